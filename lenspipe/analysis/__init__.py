"""Analysis: questions asked of a finished dataset. Importing it registers the accessor `ds.lens`."""

from lenspipe.analysis.accessor import Lens
from lenspipe.analysis.opening import one_lens, open_dataset
from lenspipe.analysis.tables import emergence, layer_table

__all__ = ["Lens", "emergence", "layer_table", "one_lens", "open_dataset"]
