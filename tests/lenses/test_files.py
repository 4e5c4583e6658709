"""Lens files: each format gives the right map at the right layer, and every other file is refused."""

import json
import os
import pickle
import re
import struct
import subprocess
import sys
import zipfile
from collections import OrderedDict

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from lenspipe.errors import RequestError
from lenspipe.lenses.files import lens_digest, load_lens

D, N = 5, 4
"""Width and blocks of the model that the lenses are for."""

CONFIG = {
    "base_model_name_or_path": "some/model",
    "d_model": D,
    "num_hidden_layers": N,
    "bias": True,
    "base_model_revision": None,
    "unemebd_hash": "0123",
    "lens_type": "linear_tuned_lens",
}


def drawn(*shape, seed=0):
    return torch.tensor(np.random.default_rng(seed).standard_normal(shape), dtype=torch.float32)


def tuned_state(bias=True, layers=range(N), width=D):
    state = OrderedDict()
    for i in layers:
        state[f"{i}.weight"] = drawn(width, width, seed=i)
        if bias:
            state[f"{i}.bias"] = drawn(width, seed=100 + i)
    return state


def legacy_state(layers=range(N - 1)):
    state = OrderedDict()
    state["layer_norm.weight"], state["layer_norm.bias"] = drawn(D, seed=7), drawn(D, seed=8)
    state["unembedding.weight"] = drawn(11, D, seed=9)
    state["input_translator.weight"], state["input_translator.bias"] = drawn(D, D, seed=0), drawn(D, seed=100)
    for i in layers:
        state[f"layer_translators.{i}.weight"] = drawn(D, D, seed=i + 1)
        state[f"layer_translators.{i}.bias"] = drawn(D, seed=101 + i)
    return state


def jacobian_values(blocks=range(N - 1), width=D, **changes):
    matrices = {block: drawn(width, width, seed=50 + block).half() for block in blocks}
    return {"J": matrices, "n_prompts": 9, "source_layers": list(blocks), "d_model": width} | changes


def checkpoint_values(n_done=7, blocks=range(N - 1), **changes):
    sums = {block: drawn(D, D, seed=50 + block) for block in blocks}
    return {"jacobian_sum": sums, "n_done": n_done, "next_idx": 9, "source_layers": list(blocks)} | changes


def write_tuned(folder, state=None, config=None):
    folder.mkdir(exist_ok=True)
    torch.save(tuned_state() if state is None else state, folder / "params.pt")
    (folder / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    return folder


def write(path, values):
    torch.save(values, path)
    return path


def without(values, *names):
    return {name: value for name, value in values.items() if name not in names}


def mapped(state, weight, bias, residual):
    """The map in float64, by loops."""
    state, weight = state.double().numpy(), weight.double().numpy()
    result = state.copy() if residual else np.zeros_like(state)
    for row in range(state.shape[0]):
        for i in range(D):
            result[row, i] += sum(weight[i, j] * state[row, j] for j in range(D))
            result[row, i] += 0.0 if bias is None else float(bias[i])
    return result


def assert_maps(lens, layer, weight, bias, residual):
    state = drawn(3, D, seed=1000)
    found = lens.apply(state, layer)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), mapped(state, weight, bias, residual), rtol=1e-5, atol=1e-5)


def assert_refused(path, *words, d_model=D, n_blocks=N):
    with pytest.raises(RequestError) as caught:
        load_lens(path, d_model, n_blocks)
    for word in words:
        assert word in str(caught.value)


def identity_layers(lens, layers):
    state = drawn(3, D, seed=1000)
    return [layer for layer in layers if torch.equal(lens.apply(state, layer), state)]


# The right map at the right layer.


def test_a_tuned_lens_maps_the_state_that_enters_block_i(tmp_path):
    lens = load_lens(write_tuned(tmp_path / "mine"), D, N)
    assert (lens.name, lens.kind, lens.n_blocks, sorted(lens.translators)) == ("mine", "tuned", N, [0, 1, 2, 3])
    state = tuned_state()
    for layer in range(N):
        assert_maps(lens, layer, state[f"{layer}.weight"], state[f"{layer}.bias"], residual=True)


def test_a_legacy_tuned_lens_maps_the_input_and_the_states_that_leave_block_i(tmp_path):
    state = legacy_state()
    lens = load_lens(write(tmp_path / "old.pt", state), D, N)
    assert (lens.name, lens.kind, sorted(lens.translators)) == ("old.pt", "tuned", [0, 1, 2, 3])
    assert_maps(lens, 0, state["input_translator.weight"], state["input_translator.bias"], residual=True)
    for i in range(N - 1):
        name = f"layer_translators.{i}"
        assert_maps(lens, i + 1, state[f"{name}.weight"], state[f"{name}.bias"], residual=True)


def test_a_jacobian_lens_maps_the_state_that_leaves_block_l(tmp_path):
    values = jacobian_values()
    lens = load_lens(write(tmp_path / "lens.pt", values), D, N)
    assert (lens.name, lens.kind, sorted(lens.translators)) == ("lens.pt", "jacobian", [1, 2, 3])
    for block, matrix in values["J"].items():
        assert_maps(lens, block + 1, matrix, None, residual=False)


@pytest.mark.parametrize("place", range(N))
def test_a_tuned_lens_that_is_the_identity_at_exactly_one_layer_proves_the_index(tmp_path, place):
    state = tuned_state()
    state[f"{place}.weight"].zero_()
    state[f"{place}.bias"].zero_()
    assert identity_layers(load_lens(write_tuned(tmp_path / "a", state), D, N), range(N)) == [place]


@pytest.mark.parametrize("place", range(N - 1))
def test_a_legacy_lens_that_is_the_identity_at_exactly_one_layer_proves_the_index(tmp_path, place):
    state = legacy_state()
    state[f"layer_translators.{place}.weight"].zero_()
    state[f"layer_translators.{place}.bias"].zero_()
    assert identity_layers(load_lens(write(tmp_path / "a.pt", state), D, N), range(N)) == [place + 1]


@pytest.mark.parametrize("place", range(N - 1))
def test_a_jacobian_lens_that_is_the_identity_at_exactly_one_layer_proves_the_index(tmp_path, place):
    values = jacobian_values()
    values["J"][place] = torch.eye(D).half()
    assert identity_layers(load_lens(write(tmp_path / "a.pt", values), D, N), range(1, N)) == [place + 1]


def test_a_fit_checkpoint_is_divided_by_the_prompts_done_in_float32(tmp_path):
    values = checkpoint_values(n_done=7)
    lens = load_lens(write(tmp_path / "checkpoint.pt", values), D, N)
    for block, total in values["jacobian_sum"].items():
        expected = (total.numpy() / np.float32(7)).astype(np.float32)
        np.testing.assert_array_equal(lens.translators[block + 1].weight_DD.numpy(), expected)


def test_numbers_in_half_precision_are_applied_in_float32(tmp_path):
    lens = load_lens(write(tmp_path / "a.pt", jacobian_values()), D, N)
    assert {one.weight_DD.dtype for one in lens.translators.values()} == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_a_tuned_lens_of_any_float_type_loads(tmp_path, dtype):
    state = {name: value.to(dtype) for name, value in tuned_state().items()}
    lens = load_lens(write_tuned(tmp_path / "a", state), D, N)
    assert_maps(lens, 2, state["2.weight"].float(), state["2.bias"].float(), residual=True)


@pytest.mark.parametrize("config", [CONFIG | {"bias": False}, without(CONFIG, "bias")])
def test_a_tuned_lens_without_biases_adds_none(tmp_path, config):
    lens = load_lens(write_tuned(tmp_path / "a", tuned_state(bias=False), config), D, N)
    assert_maps(lens, 1, tuned_state()["1.weight"], None, residual=True)


def test_a_tuned_lens_may_leave_out_its_type(tmp_path):
    plain = write_tuned(tmp_path / "a", config=without(CONFIG, "lens_type", "unemebd_hash") | {"unembed_hash": 5})
    assert load_lens(plain, D, N).kind == "tuned"


@pytest.mark.parametrize("make, name", [(tuned_state, "params.safetensors"), (legacy_state, "old.safetensors")])
def test_the_same_names_in_safetensors_give_the_same_maps(tmp_path, make, name):
    save_file(dict(make()), tmp_path / name)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    lens = load_lens(tmp_path, D, N)
    assert_maps(lens, 2, drawn(D, D, seed=2), drawn(D, seed=102), residual=True)


def test_a_state_dict_of_parameters_with_module_versions_loads(tmp_path):
    module = torch.nn.ModuleList([torch.nn.Linear(D, D) for _ in range(N)])
    lens = load_lens(write_tuned(tmp_path / "a", module.state_dict()), D, N)
    assert_maps(lens, 3, module[3].weight.detach(), module[3].bias.detach(), residual=True)


def test_a_transposed_matrix_is_read_as_what_it_means(tmp_path):
    values = jacobian_values()
    values["J"][1] = values["J"][1].T
    assert_maps(load_lens(write(tmp_path / "a.pt", values), D, N), 2, jacobian_values()["J"][1].T, None, False)


def test_a_folder_with_one_file_of_tensors_is_that_lens(tmp_path):
    folder = tmp_path / "lens-of-mine"
    folder.mkdir()
    write(folder / "lens.pt", jacobian_values())
    (folder / "README.md").write_text("a lens")
    lens = load_lens(folder, D, N)
    assert (lens.name, lens.kind) == ("lens-of-mine", "jacobian")
    assert lens_digest(folder) == lens_digest(folder / "lens.pt")


def test_a_legacy_folder_needs_nothing_of_its_config(tmp_path):
    folder = write_tuned(tmp_path / "a", legacy_state(), {"d_model": D, "num_layers": N, "mlp_hidden_sizes": []})
    assert sorted(load_lens(folder, D, N).translators) == [0, 1, 2, 3]


def test_a_legacy_lens_may_bring_a_map_for_the_last_layer(tmp_path):
    lens = load_lens(write(tmp_path / "a.pt", legacy_state(range(N))), D, N)
    assert_maps(lens, N, drawn(D, D, seed=N), drawn(D, seed=100 + N), residual=True)


def test_a_jacobian_lens_may_have_gaps(tmp_path):
    lens = load_lens(write(tmp_path / "a.pt", jacobian_values([0, 2])), D, N)
    assert [layer for layer in range(N + 1) if lens.covers(layer)] == [1, 3, 4]


@pytest.mark.parametrize(
    "extra",
    [{"metadata": {"model_name": "x", "folded": False}}, {"target_layer": N - 1}, {"skip_first": 16, "note": "x"}],
)
def test_plain_facts_beside_a_jacobian_lens_change_nothing(tmp_path, extra):
    assert sorted(load_lens(write(tmp_path / "a.pt", jacobian_values() | extra), D, N).translators) == [1, 2, 3]


def test_a_jacobian_lens_may_say_nothing_beside_its_matrices(tmp_path):
    lens = load_lens(write(tmp_path / "a.pt", {"J": jacobian_values()["J"]}), D, N)
    assert sorted(lens.translators) == [1, 2, 3]


def test_a_lens_behind_links_loads_under_the_name_of_the_link(tmp_path):
    (tmp_path / "blobs").mkdir()
    target = write(tmp_path / "blobs" / "0f1e", jacobian_values())
    (tmp_path / "nice.pt").symlink_to(target)
    assert load_lens(tmp_path / "nice.pt", D, N).name == "nice.pt"
    assert lens_digest(tmp_path / "nice.pt") == lens_digest(target)


def test_a_loaded_lens_does_not_hold_on_to_its_file(tmp_path):
    path = write(tmp_path / "a.pt", jacobian_values({0: 0}))
    lens = load_lens(path, D, N)
    path.write_bytes(b"")
    assert_maps(lens, 1, jacobian_values()["J"][0], None, residual=False)


# The digest.


def test_the_digest_is_64_hexadecimal_characters_and_the_same_again(tmp_path):
    folder = write_tuned(tmp_path / "a")
    assert re.fullmatch(r"[0-9a-f]{64}", lens_digest(folder))
    assert lens_digest(folder) == lens_digest(folder)


def test_the_digest_does_not_depend_on_the_folders_name(tmp_path):
    folder = write_tuned(tmp_path / "a")
    before = lens_digest(folder)
    assert lens_digest(folder.rename(tmp_path / "b")) == before


def test_the_digest_changes_with_one_bit_of_one_number(tmp_path):
    path = write(tmp_path / "a.pt", jacobian_values())
    before = lens_digest(path)
    values = jacobian_values()
    values["J"][1].view(torch.int16)[2, 3] ^= 1
    assert lens_digest(write(path, values)) != before


def test_the_digest_changes_with_the_prompts_done(tmp_path):
    path = tmp_path / "a.pt"
    assert lens_digest(write(path, checkpoint_values(7))) != lens_digest(write(path, checkpoint_values(8)))


@pytest.mark.parametrize("change", [{"d_model": D + 1}, {"num_hidden_layers": N + 1}, {"bias": False}])
def test_the_digest_changes_with_what_in_the_config_changes_numbers(tmp_path, change):
    folder = write_tuned(tmp_path / "a")
    before = lens_digest(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG | change))
    assert lens_digest(folder) != before


@pytest.mark.parametrize("change", [{"base_model_name_or_path": "other"}, {"unemebd_hash": "9"}, {"more": [1, 2]}])
def test_the_digest_does_not_change_with_the_rest_of_the_config(tmp_path, change):
    folder = write_tuned(tmp_path / "a")
    before = lens_digest(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG | change, indent=3))
    assert lens_digest(folder) == before


def test_the_digest_imports_no_torch(tmp_path):
    paths = [write_tuned(tmp_path / "t"), write(tmp_path / "l.pt", legacy_state()), tmp_path / "s.safetensors"]
    paths.append(write(tmp_path / "j.pt", jacobian_values()))
    save_file(dict(legacy_state()), tmp_path / "s.safetensors")
    program = (
        "import sys; from pathlib import Path; from lenspipe.lenses.files import lens_digest\n"
        "for path in sys.argv[1:]: print(lens_digest(Path(path)))\n"
        "assert 'torch' not in sys.modules and 'safetensors' not in sys.modules"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, *map(str, paths)], capture_output=True, text=True, check=False, timeout=60
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [lens_digest(path) for path in paths]


# Files that would run code.


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def evil_files(tmp_path):
    """Code in every place that it could be."""
    evil = Evil(tmp_path / "run")
    bare = tmp_path / "bare.pt"
    bare.write_bytes(pickle.dumps(evil, protocol=2))
    old = tmp_path / "old-format.pt"
    torch.save(jacobian_values() | {"x": evil}, old, _use_new_zipfile_serialization=False)
    new_protocol = tmp_path / "protocol.pt"
    torch.save(jacobian_values() | {"x": evil}, new_protocol, pickle_protocol=4)
    oldest_protocol = tmp_path / "oldest.pt"
    torch.save(jacobian_values() | {"x": evil}, oldest_protocol, pickle_protocol=0)
    return [
        bare,
        old,
        new_protocol,
        oldest_protocol,
        write(tmp_path / "alone.pt", evil),
        write(tmp_path / "beside.pt", jacobian_values() | {"x": evil}),
        write(tmp_path / "legacy.pt", legacy_state() | {"layer_norm.weight": evil}),
        write_tuned(tmp_path / "tuned", tuned_state() | {"0.weight": evil}),
    ]


@pytest.mark.parametrize("look", [lens_digest, lambda path: load_lens(path, D, N)])
def test_a_pickle_with_code_is_refused_and_not_run(tmp_path, look):
    for path in evil_files(tmp_path):
        with pytest.raises(RequestError, match=r"would run code|without running code|bare pickle"):
            look(path)
        assert not (tmp_path / "run").exists()


def test_a_pickled_module_is_refused_by_the_loader(tmp_path):
    assert_refused(write(tmp_path / "a.pt", jacobian_values() | {"x": torch.nn.Linear(2, 2)}), "run code")


def test_code_that_the_sieve_lets_through_meets_the_wall(tmp_path, monkeypatch):
    path = write(tmp_path / "a.pt", jacobian_values() | {"x": Evil(tmp_path / "run")})
    monkeypatch.setattr("lenspipe.lenses.contents._is_tensor_part", lambda name: True)
    assert_refused(path, "cannot be loaded as plain tensors (it holds something else): nothing of it was run")
    assert not (tmp_path / "run").exists()


# Nothing, or nothing known.


def both(path):
    """The refusals of the digest and of the loader, which agree."""
    said = []
    for look in (lens_digest, lambda path: load_lens(path, D, N)):
        with pytest.raises(RequestError) as caught:
            look(path)
        said.append(str(caught.value))
    assert said[0] == said[1]
    return said[0]


def test_nothing_at_the_path_is_refused_with_the_known_formats(tmp_path):
    said = both(tmp_path / "missing")
    assert "found nothing" in said
    for known in ("tuned-lens folder", "legacy tuned-lens", "Jacobian lens"):
        assert known in said


def test_a_link_to_nothing_is_named_as_such(tmp_path):
    (tmp_path / "a.pt").symlink_to(tmp_path / "missing")
    assert "a link to nothing" in both(tmp_path / "a.pt")


def test_a_link_to_itself_is_refused(tmp_path):
    (tmp_path / "a.pt").symlink_to(tmp_path / "a.pt")
    assert "no lens" in both(tmp_path / "a.pt")


def test_a_pipe_is_refused_without_waiting_for_it(tmp_path):
    os.mkfifo(tmp_path / "a.pt")
    assert "no file or folder" in both(tmp_path / "a.pt")


def test_a_file_where_a_folder_is_needed_is_refused(tmp_path):
    write(tmp_path / "a.pt", jacobian_values())
    assert "no lens at" in both(tmp_path / "a.pt" / "lens.pt")


def test_an_empty_folder_is_refused(tmp_path):
    assert "found nothing" in both(tmp_path)


def test_a_folder_without_tensors_is_refused_with_what_is_in_it(tmp_path):
    for i in range(12):
        (tmp_path / f"text{i:02}.md").write_text("x")
    said = both(tmp_path)
    assert "text00.md, text01.md" in said
    assert "and 4 more" in said


def test_a_config_without_numbers_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert "found config.json" in both(tmp_path)


def test_a_folder_named_like_the_file_is_refused(tmp_path):
    (tmp_path / "params.pt").mkdir()
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert "params.pt (not a file)" in both(tmp_path)


def test_two_files_of_tensors_in_a_folder_are_ambiguous(tmp_path):
    write(tmp_path / "a.pt", jacobian_values())
    write(tmp_path / "b.pt", jacobian_values())
    assert "more than one file of tensors (a.pt and b.pt)" in both(tmp_path)


def test_a_tuned_lens_in_two_containers_is_ambiguous(tmp_path):
    save_file(dict(tuned_state()), write_tuned(tmp_path / "a") / "params.safetensors")
    assert "more than one" in both(tmp_path / "a")


def test_the_numbers_of_a_tuned_lens_without_its_config_are_refused(tmp_path):
    folder = write_tuned(tmp_path / "a")
    assert "name the folder that has both" in both(folder / "params.pt")
    (folder / "config.json").unlink()
    assert "without its config.json" in both(folder)


@pytest.mark.parametrize(
    "values", [{"weight": torch.ones(2)}, {}, [torch.ones(2)], torch.ones(2), {0: torch.ones(2, 2)}, "text"]
)
def test_tensors_that_are_no_lens_are_refused(tmp_path, values):
    assert "is no lens: expected" in both(write(tmp_path / "a.pt", values))


def test_a_model_is_not_a_lens(tmp_path):
    save_file({"model.embed_tokens.weight": torch.ones(3, 2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"hidden_size": 2}')
    assert "found model.embed_tokens.weight" in both(tmp_path)


@pytest.mark.parametrize("data", [b"", b"x", b"text, and no tensors", b"PK\x03\x04", b"PK\x03\x04" + bytes(200)])
def test_bytes_that_are_no_tensors_are_refused(tmp_path, data):
    (tmp_path / "a.pt").write_bytes(data)
    assert str(tmp_path / "a.pt") in both(tmp_path / "a.pt")


def test_a_zip_archive_of_something_else_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("lens.pt", b"x")
    assert "0 files data.pkl" in both(tmp_path / "a.pt")


def test_a_file_that_grows_when_unpacked_is_refused(tmp_path):
    write(tmp_path / "a.pt", jacobian_values())
    with zipfile.ZipFile(tmp_path / "a.pt") as old, zipfile.ZipFile(tmp_path / "b.pt", "w") as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry), compress_type=zipfile.ZIP_DEFLATED)
    assert "compressed, which torch.save never does" in both(tmp_path / "b.pt")


def test_an_unreadable_file_is_refused(tmp_path, monkeypatch):
    path = write(tmp_path / "a.pt", jacobian_values())

    def denied(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("lenspipe.lenses.files.contents_of", denied)
    assert "cannot be read" in both(path)


# Damage.


def test_a_file_cut_short_anywhere_is_refused(tmp_path):
    whole = write(tmp_path / "a.pt", jacobian_values()).read_bytes()
    for length in range(0, len(whole), 97):
        (tmp_path / "a.pt").write_bytes(whole[:length])
        both(tmp_path / "a.pt")


def test_a_safetensors_file_cut_short_anywhere_is_refused(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file(dict(legacy_state()), path)
    whole = path.read_bytes()
    for length in range(0, len(whole), 41):
        path.write_bytes(whole[:length])
        assert_refused(path)


def test_a_changed_bit_in_the_numbers_is_found(tmp_path):
    path = write(tmp_path / "a.pt", jacobian_values())
    needle = jacobian_values()["J"][1].numpy().tobytes()
    data = bytearray(path.read_bytes())
    data[data.index(needle) + 4] ^= 1
    path.write_bytes(data)
    assert_refused(path, "damaged", "checksum")


def test_a_changed_byte_anywhere_never_gives_another_error(tmp_path):
    whole = write(tmp_path / "a.pt", jacobian_values([0])).read_bytes()
    for place in range(0, len(whole), 13):
        data = bytearray(whole)
        data[place] ^= 0x55
        (tmp_path / "a.pt").write_bytes(data)
        try:
            lens = load_lens(tmp_path / "a.pt", D, N)
        except RequestError:
            continue
        assert_maps(lens, 1, jacobian_values()["J"][0], None, residual=False)  # the byte was padding


def test_a_name_twice_in_safetensors_is_refused(tmp_path):
    entry = '{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    header = f'{{"layer_translators.0.weight":{entry},"layer_translators.0.weight":{entry}}}'.encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    assert "appears twice" in both(tmp_path / "a.safetensors")


@pytest.mark.parametrize("header", [b"{" * 100_000, b"{\xff}", b'{"a": 1', b'{"a": ' + b"9" * 5000 + b"}"])
def test_a_safetensors_header_that_is_no_json_is_refused(tmp_path, header):
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    assert "its header" in both(tmp_path / "a.safetensors")


def test_a_storage_that_is_missing_is_refused(tmp_path):
    write(tmp_path / "a.pt", jacobian_values())
    with zipfile.ZipFile(tmp_path / "a.pt") as old, zipfile.ZipFile(tmp_path / "b.pt", "w") as new:
        for entry in old.infolist():
            if not entry.filename.endswith("data/1"):
                new.writestr(entry, old.read(entry))
    assert_refused(tmp_path / "b.pt", "cannot be loaded")


# A config that is wrong.


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, b"\xff\xfe", '{"d_model": 5'])
def test_a_config_that_is_no_json_is_refused(tmp_path, text):
    folder = write_tuned(tmp_path / "a")
    (folder / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert "is not JSON" in both(folder)


def test_a_config_that_is_no_object_is_refused(tmp_path):
    assert "holds a list" in both(write_tuned(tmp_path / "a", config=[1]))


@pytest.mark.parametrize("lens_type", ["mlp_tuned_lens", None, 3, ""])
def test_an_unknown_type_of_lens_is_refused(tmp_path, lens_type):
    said = both(write_tuned(tmp_path / "a", config=CONFIG | {"lens_type": lens_type}))
    assert f"lens_type {lens_type!r}: only 'linear_tuned_lens'" in said


@pytest.mark.parametrize("name", ["d_model", "num_hidden_layers"])
@pytest.mark.parametrize("value", [None, 0, -1, 2.0, "5", True, [5]])
def test_a_size_in_the_config_that_is_no_positive_number_is_refused(tmp_path, name, value):
    assert f"{name} {value!r}" in both(write_tuned(tmp_path / "a", config=CONFIG | {name: value}))


@pytest.mark.parametrize("bias", [1, "yes", []])
def test_a_bias_in_the_config_that_is_not_true_or_false_is_refused(tmp_path, bias):
    assert f"bias {bias!r}" in both(write_tuned(tmp_path / "a", config=CONFIG | {"bias": bias}))


@pytest.mark.parametrize("says, holds", [(True, False), (False, True)])
def test_a_config_and_numbers_that_differ_about_biases_are_refused(tmp_path, says, holds):
    folder = write_tuned(tmp_path / "a", tuned_state(bias=holds), CONFIG | {"bias": says})
    assert_refused(folder, f"bias {str(says).lower()}", "one of the two is of another lens")


# A lens of another model.


@pytest.mark.parametrize(
    "make",
    [
        write_tuned,
        lambda path: write(path, legacy_state()),
        lambda path: write(path, jacobian_values()),
        lambda path: write(path, checkpoint_values()),
    ],
)
def test_a_lens_of_a_model_of_another_width_is_refused(tmp_path, make):
    assert_refused(make(tmp_path / "a"), str(D), str(D + 1), "belongs to another model", d_model=D + 1)


@pytest.mark.parametrize("n_blocks", [1, N - 1, N + 1, 10**9])
def test_a_tuned_lens_of_a_model_of_another_depth_is_refused(tmp_path, n_blocks):
    folder = write_tuned(tmp_path / "a")
    assert_refused(folder, f"num_hidden_layers {N}", f"asks for {n_blocks}", n_blocks=n_blocks)


@pytest.mark.parametrize("n_blocks", [1, N - 2, N + 1])
def test_a_legacy_lens_of_a_model_of_another_depth_is_refused(tmp_path, n_blocks):
    assert_refused(write(tmp_path / "a.pt", legacy_state()), "belongs to another model", n_blocks=n_blocks)


@pytest.mark.parametrize("blocks", [[0, N], [-1, 0], [10**30]])
def test_a_jacobian_lens_with_a_block_that_the_model_lacks_is_refused(tmp_path, blocks):
    matrices = {block: torch.eye(D) for block in blocks}
    path = write(tmp_path / "a.pt", jacobian_values(J=matrices, source_layers=blocks))
    assert_refused(path, f"blocks 0 to {N - 1}", "belongs to another model")


@pytest.mark.parametrize("target", [N - 2, N, -1, None, "last"])
def test_a_jacobian_lens_to_another_state_than_the_last_is_refused(tmp_path, target):
    path = write(tmp_path / "a.pt", jacobian_values(target_layer=target))
    assert_refused(path, f"block {target!r}", "only the last one")


@pytest.mark.parametrize("width", [D + 1, None, "5", True])
def test_a_jacobian_lens_that_says_another_width_is_refused(tmp_path, width):
    assert_refused(write(tmp_path / "a.pt", jacobian_values(d_model=width)), f"d_model {width!r}")


# Numbers that are no lens.


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["2.weight", "1.bias"])
def test_a_tuned_lens_with_a_number_that_is_not_finite_is_refused(tmp_path, name, value):
    state = tuned_state()
    state[name].view(-1)[-1] = value
    assert_refused(write_tuned(tmp_path / "a", state), name.split(".")[1], f"layer {name[0]}", "NaN")


def test_a_jacobian_lens_with_a_number_that_is_not_finite_is_refused(tmp_path):
    values = jacobian_values()
    values["J"][1][0, 0] = float("inf")
    assert_refused(write(tmp_path / "a.pt", values), "J[1]", "NaN")


def test_a_number_beyond_float32_is_refused(tmp_path):
    state = tuned_state()
    state["0.weight"] = torch.full((D, D), 1e200, dtype=torch.float64)
    assert_refused(write_tuned(tmp_path / "a", state), "beyond float32")


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(D, D, dtype=torch.int32),
        torch.ones(D, D, dtype=torch.complex64),
        torch.ones(D, D, dtype=torch.bool),
        torch.eye(D).to_sparse(),
        torch.ones(D, D, device="meta"),
        1.0,
        None,
        [1.0],
    ],
)
def test_a_weight_that_is_no_dense_tensor_of_floats_is_refused(tmp_path, value):
    assert_refused(write_tuned(tmp_path / "a", tuned_state() | {"1.weight": value}), "dense tensor")


@pytest.mark.parametrize("shape", [(D, D + 1), (D + 1, D), (2, D, D), (D,), (), (D * D,)])
def test_a_weight_that_is_not_square_is_refused(tmp_path, shape):
    folder = write_tuned(tmp_path / "a", tuned_state() | {"1.weight": torch.ones(shape)})
    assert_refused(folder, "layer 1", f"shape {list(shape)}", f"[{D}, {D}]")


@pytest.mark.parametrize("shape", [(D + 1,), (1, D), ()])
def test_a_bias_of_another_shape_is_refused(tmp_path, shape):
    folder = write_tuned(tmp_path / "a", tuned_state() | {"1.bias": torch.ones(shape)})
    assert_refused(folder, "bias of layer 1", f"shape {list(shape)}")


@pytest.mark.parametrize("shape", [(D, 2 * D), (3, D, D), (D - 1, D)])
def test_a_rectangular_or_head_level_jacobian_is_refused(tmp_path, shape):
    values = jacobian_values()
    values["J"][1] = torch.ones(shape)
    assert_refused(write(tmp_path / "a.pt", values), "J[1]", f"shape {list(shape)}", "head")


def test_a_huge_tensor_is_refused_by_its_shape_before_it_is_read(tmp_path):
    values = jacobian_values()
    values["J"][1] = torch.zeros(1).expand(2**20, 2**20)
    assert_refused(write(tmp_path / "a.pt", values), "shape [1048576, 1048576]")


# Names that are wrong.


@pytest.mark.parametrize("layers", [[0, 1, 2], [1, 2, 3], [0, 1, 3], [0, 1, 2, 3, 4], [0, 1, 2, 7]])
def test_another_set_of_translators_than_the_config_says_is_refused(tmp_path, layers):
    assert_refused(write_tuned(tmp_path / "a", tuned_state(layers=layers)), f"layers {layers}", "0 to 3")


@pytest.mark.parametrize("missing", ["2.bias", "0.weight"])
def test_half_a_translator_is_refused(tmp_path, missing):
    assert_refused(write_tuned(tmp_path / "a", without(tuned_state(), missing)), "layers")


@pytest.mark.parametrize(
    "name", [0, 1.5, None, (0, "weight"), "00.weight", "0.gain", "x.weight", "-1.weight", "0.weight ", "9999999.bias"]
)
def test_a_name_that_is_no_part_of_a_tuned_lens_is_refused(tmp_path, name):
    folder = write_tuned(tmp_path / "a", tuned_state() | {name: torch.ones(D, D)})
    assert_refused(folder, repr(name), "no part of a lens")


def test_a_tuned_lens_of_two_generations_at_once_is_refused(tmp_path):
    assert_refused(write_tuned(tmp_path / "a", tuned_state() | legacy_state()), "'0.weight'", "no part of a lens")


@pytest.mark.parametrize(
    "name",
    [
        "layer_translators.0.0.weight",
        "layer_translators.0.u",
        "input_translator.2.weight",
        "attn_translators.0.weight",
        "extra_layers.0.weight",
        "layer_translators.00.weight",
        5,
    ],
)
def test_a_legacy_lens_that_is_not_linear_is_refused(tmp_path, name):
    path = write(tmp_path / "a.pt", legacy_state() | {name: torch.ones(D, D)})
    assert_refused(path, repr(name), "linear translators")


def test_a_legacy_lens_without_its_input_translator_is_refused(tmp_path):
    state = without(legacy_state(), "input_translator.weight", "input_translator.bias")
    assert_refused(write(tmp_path / "a.pt", state), "layers [1, 2, 3]")


def test_a_legacy_lens_with_a_gap_is_refused(tmp_path):
    assert_refused(write(tmp_path / "a.pt", legacy_state([0, 2])), "layers [0, 1, 3]")


def test_an_empty_jacobian_lens_is_refused(tmp_path):
    assert_refused(write(tmp_path / "a.pt", jacobian_values([])), "the lens is empty")


@pytest.mark.parametrize("key", ["1", 1.0, True, None, (1,)])
def test_a_jacobian_lens_whose_layers_are_not_whole_numbers_is_refused(tmp_path, key):
    path = write(tmp_path / "a.pt", jacobian_values(J={0: torch.eye(D), key: torch.eye(D)}))
    assert_refused(path, f"the layer {key!r}", "whole numbers")


@pytest.mark.parametrize("sources", [[0, 1], [0, 1, 2, 3], [1, 2, 3], [0, 1, 2, 2], [], "012", None, ["0", "1", "2"]])
def test_source_layers_that_differ_from_the_matrices_are_refused(tmp_path, sources):
    assert_refused(write(tmp_path / "a.pt", jacobian_values(source_layers=sources)), "source_layers")


@pytest.mark.parametrize("sources", [[2, 0, 1], (0, 1, 2)])
def test_source_layers_may_come_in_any_order(tmp_path, sources):
    assert load_lens(write(tmp_path / "a.pt", jacobian_values(source_layers=sources)), D, N).kind == "jacobian"


@pytest.mark.parametrize("n_done", [0, -1, None, 2.0, "7", True])
def test_a_fit_checkpoint_without_prompts_done_is_refused(tmp_path, n_done):
    assert_refused(write(tmp_path / "a.pt", checkpoint_values(n_done)), f"n_done {n_done!r}")


def test_a_fit_checkpoint_that_does_not_say_how_many_prompts_is_refused(tmp_path):
    assert_refused(write(tmp_path / "a.pt", without(checkpoint_values(), "n_done")), "n_done None")


def test_a_lens_and_a_checkpoint_in_one_file_are_refused(tmp_path):
    assert_refused(write(tmp_path / "a.pt", jacobian_values() | checkpoint_values()), "either J or jacobian_sum")


@pytest.mark.parametrize("matrices", [torch.ones(3, D, D), [torch.eye(D)], None])
def test_matrices_that_are_not_named_by_layer_are_refused(tmp_path, matrices):
    assert_refused(write(tmp_path / "a.pt", jacobian_values(J=matrices)), "J: ", "is no Jacobian lens")


@pytest.mark.parametrize("extra", [torch.ones(D), {0: torch.ones(D)}, [torch.ones(D)], {"a": ({"b": torch.ones(1)},)}])
def test_tensors_beside_the_matrices_are_refused(tmp_path, extra):
    assert_refused(write(tmp_path / "a.pt", jacobian_values(offset=extra)), "tensors under 'offset'")


def test_a_jacobian_file_that_is_no_dict_is_refused(tmp_path):
    assert_refused(write(tmp_path / "a.pt", ["J", torch.eye(D)]), "holds a list")


def test_a_jacobian_lens_inside_another_dict_is_refused(tmp_path):
    assert_refused(write(tmp_path / "a.pt", {"nested": jacobian_values()}), "is no Jacobian lens", "nested: dict")
