"""Command line: `lenspipe COMMAND`; each module here holds some of the commands."""

from lenspipe.cli import comparing, keeping, looking, running
from lenspipe.cli.frame import app, main

__all__ = ["app", "comparing", "keeping", "looking", "main", "running"]
