"""An error names what is wrong with a checkpoint or a disk, and no target folder is left."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import shutil
from pathlib import Path

import cover
import pytest
import torch
from folders import read, write, write_folder
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from megatron_rl.commands import hf_to_megatron, megatron_to_hf, verify_checkpoint
from megatron_rl.convert import Options, Verification, open_checkpoint, smallest_mesh, to_hub, to_open, to_ranks, work
from megatron_rl.convert.manifest import saved_shape
from megatron_rl.convert.work import require_new
from megatron_rl.models import read_shape
from megatron_rl.types import ModelShape

SMALL = dict(num_hidden_layers=2, hidden_size=8, vocab_size=40)


@pytest.fixture(scope="module")
def forms(tmp_path_factory) -> dict[str, Path]:
    """The same model in every form. All folders but `origin` have a manifest."""
    root = tmp_path_factory.mktemp("forms")
    hub = write_folder(root / "origin", "qwen3_tied", **SMALL)
    write(to_open(open_checkpoint(hub), Options(max_file_bytes=4000)), root / "open")
    ranks = to_ranks(open_checkpoint(hub), smallest_mesh(2, 1, None, pipeline=2), True, Options(max_file_bytes=2000))
    write(ranks, root / "ranks")
    write(to_hub(open_checkpoint(root / "open"), Options(max_file_bytes=4000)), root / "hub")
    return {name: root / name for name in ("origin", "open", "ranks", "hub")}


FORMS = ("open", "ranks", "hub")


def verify(folder: Path, against: Path | None = None):
    return Verification(folder, against).run(1, lambda done_bytes: None)


def data_files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.iterdir()) if path.suffix in (".safetensors", ".distcp")]


@pytest.mark.parametrize("form", (*FORMS, "origin"))
def test_what_is_whole_is_found_whole(forms, form):
    for other in forms.values():
        verified = verify(forms[form], other)
        assert verified.num_tensors == verified.num_compared == len(read(forms["origin"]))
    # norms over two TP ranks, six in each of two layers and the last one, and the tied embedding's last stage
    assert verified.num_copies == (2 * 4 + 1 + 2 if form == "ranks" else 0)


@pytest.mark.parametrize(
    ("form", "step"), [*((form, 0) for form in FORMS), ("origin", 41), *cover.essential([("origin", 1)])]
)
def test_a_file_truncated_at_any_byte_is_named(forms, form, step, tmp_path):
    """With a manifest every wrong size is an error; without one the headers must show that bytes are missing."""
    broken = shutil.copytree(forms[form], tmp_path / "broken")
    for path in data_files(broken)[-1:]:
        whole = path.read_bytes()
        lengths = range(len(whole) - 1, -1, -step) if step else (len(whole) - 1, len(whole) // 2, 0)
        for length in lengths:
            os.truncate(path, length)
            with pytest.raises(ValueError, match=path.name):
                open_checkpoint(broken)
        path.write_bytes(whole)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=cover.examples(24), deadline=None)
@given(data=st.data())
def test_a_flipped_bit_is_found_by_file_and_tensor(forms, form, tmp_path_factory, data):
    broken = shutil.copytree(forms[form], tmp_path_factory.mktemp("flip") / "broken")
    files = json.loads((broken / "manifest.json").read_text())["files"]
    name = data.draw(st.sampled_from(sorted(files)))
    path, position = broken / name, data.draw(st.integers(0, files[name]["bytes"] - 1))
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    with pytest.raises(ValueError) as error:
        verify(broken)
    for tensor, values in files[name].get("tensors", {}).items():
        if values["start"] <= position < values["start"] + values["bytes"]:
            assert str(path) in str(error.value) and tensor in str(error.value)


REFUSALS = [(form, dtype) for form in FORMS for dtype in (None, "bfloat16")]


@pytest.mark.parametrize(("form", "dtype"), cover.essential(REFUSALS, ("ranks", None), ("open", "bfloat16")))
@settings(max_examples=cover.examples(20), deadline=None)
@given(data=st.data())
def test_a_conversion_refuses_a_flipped_bit(forms, form, dtype, tmp_path_factory, data):
    """This holds whether the bytes are copied or converted. The small files split the parts of fused tensors, and two
    workers share each of them."""
    root = tmp_path_factory.mktemp("flip")
    broken = shutil.copytree(forms[form], root / "broken")
    files = json.loads((broken / "manifest.json").read_text())["files"]
    name = data.draw(st.sampled_from([name for name, entry in files.items() if "tensors" in entry]))
    tensor = data.draw(st.sampled_from(sorted(files[name]["tensors"])))
    values = files[name]["tensors"][tensor]
    content = bytearray((broken / name).read_bytes())
    content[values["start"] + data.draw(st.integers(0, values["bytes"] - 1))] ^= 1 << data.draw(st.integers(0, 7))
    (broken / name).write_bytes(content)
    convert = to_open if form == "hub" else to_hub
    before, work.MIN_STRETCH_BYTES = work.MIN_STRETCH_BYTES, data.draw(st.sampled_from([50, 2**25]))
    try:
        with pytest.raises(ValueError) as error:
            write(convert(open_checkpoint(broken), Options(dtype, max_file_bytes=700)), root / "target", 2)
    finally:
        work.MIN_STRETCH_BYTES = before
    assert f"{name}: tensor {tensor} is damaged" in str(error.value) or "the two should be the same" in str(error.value)
    assert {path.name for path in root.iterdir()} <= {"broken", "target.partial"}
    assert not list((root / "target.partial").rglob("*.unfinished"))


@pytest.mark.parametrize("form", FORMS)
def test_a_missing_shard_is_named(forms, form, tmp_path):
    broken = shutil.copytree(forms[form], tmp_path / "broken")
    data_files(broken)[1].unlink()
    with pytest.raises(ValueError, match=f"{data_files(forms[form])[1].name} is missing"):
        open_checkpoint(broken)


def test_a_file_that_no_manifest_names_is_refused(forms, tmp_path):
    broken = shutil.copytree(forms["ranks"], tmp_path / "broken")
    shutil.copy(data_files(broken)[0], broken / "more.safetensors")
    with pytest.raises(ValueError, match="more.safetensors is not named"):
        open_checkpoint(broken)


@pytest.mark.parametrize("name", ["../hub/model.safetensors", "/etc/passwd", "a/../../b"])
def test_a_manifest_that_names_a_file_outside_its_folder_is_refused(forms, tmp_path, name):
    broken = shutil.copytree(forms["ranks"], tmp_path / "broken")
    fields = json.loads((broken / "manifest.json").read_text())
    fields["files"][name] = fields["files"].pop(data_files(broken)[0].name)
    (broken / "manifest.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="is damaged .*outside the folder"):
        open_checkpoint(broken)


@pytest.mark.parametrize(
    "files", [[], None, {"a": 1}, {"a": {"bytes": -1}}, {"a": {"bytes": "1"}}, {"a": {"bytes": 1, "tensors": []}}]
)
def test_a_manifest_of_another_form_is_an_error_with_its_path(forms, tmp_path, files):
    broken = shutil.copytree(forms["ranks"], tmp_path / "broken")
    fields = json.loads((broken / "manifest.json").read_text())
    (broken / "manifest.json").write_text(json.dumps(fields | {"files": files}))
    with pytest.raises(ValueError, match="broken/manifest.json"):
        open_checkpoint(broken)


def rewrite(folder: Path, change) -> None:
    """Change the tensors of a rank's first file, and adapt the manifest so that only the tensors are wrong."""
    path = data_files(folder)[0]
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)
    fields = json.loads((folder / "manifest.json").read_text())
    fields["files"][path.name] = {"bytes": path.stat().st_size, "crc32": "0", "tensors": {}}
    (folder / "manifest.json").write_text(json.dumps(fields))


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda t: t.pop("embedding.word_embeddings.weight"),
            "embedding.word_embeddings.weight of tensor0_pipeline0 is missing",
        ),
        (lambda t: t.update(extra=torch.zeros(2)), "tensor extra is unknown to the family qwen3"),
        (
            lambda t: t.update({"embedding.word_embeddings.weight": torch.zeros(31, 8)}),
            r"embedding.word_embeddings.weight is \[31, 8\].*ask for \[32, 8\].*vocab",
        ),
    ],
)
def test_a_missing_unknown_or_misshapen_tensor_is_named_with_its_rule(forms, tmp_path, change, message):
    broken = shutil.copytree(forms["ranks"], tmp_path / "broken")
    rewrite(broken, change)
    with pytest.raises(ValueError, match=message):
        open_checkpoint(broken)


def test_copies_that_differ_are_refused(tmp_path):
    """The folder of a tied model holds an output layer that differs; a conversion would silently drop it."""
    folder = write_folder(tmp_path / "hub", "qwen3_tied", **SMALL)
    save_file({"lm_head.weight": torch.ones(40, 8)}, folder / "model-00003-of-00003.safetensors")
    with pytest.raises(ValueError, match="lm_head.weight.*model.embed_tokens.weight"):
        write(to_open(open_checkpoint(folder)), tmp_path / "target")
    same = read(folder)["model.embed_tokens.weight"]
    save_file({"lm_head.weight": same}, folder / "model-00003-of-00003.safetensors")
    write(to_open(open_checkpoint(folder)), tmp_path / "target")


def test_another_model_and_other_bits_are_told_apart(forms, tmp_path):
    other = shutil.copytree(forms["origin"], tmp_path / "other")
    name = "model.layers.1.mlp.down_proj.weight"
    path = next(path for path in data_files(other) if name in load_file(path))
    tensors = load_file(path)
    tensors[name][3, 2] += 1
    save_file(tensors, path)
    with pytest.raises(ValueError, match=f"tensor {name} differs .* first in row 3"):
        verify(forms["open"], other)
    (other / "config.json").write_text(
        (other / "config.json").read_text().replace('"rope_theta": 10000.0', '"rope_theta": 5.0')
    )
    with pytest.raises(ValueError, match="different models"):
        verify(forms["open"], other)


def test_fused_tensors_of_several_dtypes_need_a_dtype(tmp_path):
    folder = write_folder(tmp_path / "hub", "qwen3", num_files=1, **SMALL)
    tensors = read(folder)
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].half()
    save_file(tensors, data_files(folder)[0])
    with pytest.raises(ValueError, match="layers.0.mlp.linear_fc1.weight"):
        to_open(open_checkpoint(folder))
    to_open(open_checkpoint(folder), Options(dtype="bfloat16"))


def test_a_disk_without_space_is_refused_before_the_start(forms, tmp_path, monkeypatch):
    conversion = to_open(open_checkpoint(forms["origin"]))
    usage = shutil._ntuple_diskusage(2**30, 2**30, conversion.num_bytes - 1)
    monkeypatch.setattr("megatron_rl.convert.work.shutil.disk_usage", lambda path: usage)
    with pytest.raises(OSError, match=f"{conversion.num_bytes:,} bytes must be written, but only {usage.free:,}"):
        write(conversion, tmp_path / "target")
    assert not list(tmp_path.iterdir()), "nothing was begun"


def test_a_target_that_cannot_be_made_is_refused_before_a_source_is_read(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nothing")
    for target in ("file", "link"):
        with pytest.raises(ValueError, match=f"{target} exists; remove it or choose another name"):
            require_new(tmp_path / target)
    for target in ("file/a", "file/a/b", "link/a"):
        with pytest.raises(ValueError, match=f"{target} cannot be made, because .*/{target[:4]} is no folder"):
            require_new(tmp_path / target)
    require_new(tmp_path / "a/b/c")


def test_a_full_disk_names_the_file_and_the_same_command_continues(tmp_path, capfd):
    """No file may be larger than 40,000 bytes, so the embedding's file fails as on a full disk."""
    hub = write_folder(tmp_path / "hub", "qwen3_tied", num_hidden_layers=2, hidden_size=8, vocab_size=2000)
    target = tmp_path / "target"
    arguments = [*map(str, (hub, target, "--tensor", 1, "--max-file-bytes", 2000, "--workers", 1))]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40000, before[1]))
    try:
        status = hf_to_megatron.main(arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    errors, name = capfd.readouterr().err, "target.partial/tensor0_pipeline0-00001-of-00010.safetensors.unfinished"
    assert status == 1 and "File too large" in errors and f"{name}: " in errors
    assert {path.name for path in tmp_path.iterdir()} <= {"hub", "target.partial"}, "finished files may be there"
    assert not list((tmp_path / "target.partial").rglob("*.unfinished"))
    assert hf_to_megatron.main(arguments) == 0
    assert verify(target, hub).num_compared
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hub", "target"]


def test_the_tools_print_json_and_a_dry_run_has_the_exact_sizes(forms, tmp_path, capsys):
    def printed(main, *arguments: object) -> dict:
        main([str(argument) for argument in arguments])
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    target = tmp_path / "target"
    arguments = (forms["origin"], target, "--max-file-bytes", 4000, "--workers", 1, "--json")
    planned = printed(hf_to_megatron.main, *arguments, "--dry-run")
    assert not list(tmp_path.iterdir())
    done = printed(hf_to_megatron.main, *arguments)
    assert {file["name"]: file["bytes"] for file in planned["files"]} == {
        str(path.relative_to(target)): path.stat().st_size
        for path in target.rglob("*")
        if path.is_file() and path.name != "manifest.json"
    }
    assert planned["num_bytes"] == done["num_bytes"] == sum(file["bytes"] for file in planned["files"])
    assert hf_to_megatron.main([str(argument) for argument in arguments]) == 1
    assert "exists; remove it or choose another name" in capsys.readouterr().err
    verified = printed(verify_checkpoint.main, target, "--against", forms["origin"], "--workers", 1, "--json")
    assert verified["num_compared"] == len(read(forms["origin"]))
    exported = printed(megatron_to_hf.main, forms["ranks"], tmp_path / "hub", "--dtype", "float16", "--json")
    assert exported["form"] == "hub"
    assert {tensor.dtype for tensor in read(tmp_path / "hub").values()} == {torch.float16}


def test_a_fault_is_one_line_and_an_exit_code(forms, tmp_path, capfd):
    broken = shutil.copytree(forms["open"], tmp_path / "broken")
    os.truncate(broken / "__0_0.distcp", 100)
    assert verify_checkpoint.main([str(broken)]) == 1
    said = capfd.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and "__0_0.distcp has 100 bytes" in said.err


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe", "olmo3", "gpt_oss", "nemotron_h"])
def test_a_manifest_of_an_earlier_version_lacks_the_layers_and_newer_fields(tmp_path, name):
    folder = write_folder(tmp_path / "hub", name)
    write(to_open(open_checkpoint(folder), Options()), tmp_path / "open")
    fields = json.loads((tmp_path / "open" / "manifest.json").read_text())
    whole = dict(fields["shape"])
    assert saved_shape(tmp_path / "open", fields) == read_shape(folder)
    for field in dataclasses.fields(ModelShape):
        if whole[field.name] == field.default:
            del fields["shape"][field.name]
    for _, layer in fields["shape"]["layers"]:
        assert layer.pop("zero_centred") is False
    assert len(fields["shape"]) < len(whole) and saved_shape(tmp_path / "open", fields) == read_shape(folder)
    del fields["shape"]["layers"]
    fields["shape"] |= {"num_heads": 4, "rope_theta": 1e4, "latent": None}
    assert saved_shape(tmp_path / "open", fields) == read_shape(folder)
    fields["shape"].pop("output", None)
    for tied, value, output in ((False, False, "own"), (True, False, "embedding"), (False, True, "value")):
        fields["shape"] |= {"tied_embeddings": tied, "value_head": value}
        assert saved_shape(tmp_path / "open", fields).output == output


def test_a_number_that_float16_cannot_hold_is_told_with_its_tensor(tmp_path):
    """Cast without a word, it would be infinite."""
    hub, name = write_folder(tmp_path / "origin", "qwen3_tied", **SMALL), "model.layers.1.mlp.up_proj.weight"
    for path in hub.glob("*.safetensors"):
        weights = load_file(path)
        if name in weights:
            weights[name] = weights[name].float()
            weights[name][0, 0] = 7e4
            save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"{name} has a number above 65,504"):
        write(to_hub(open_checkpoint(hub), Options(dtype="float16")), tmp_path / "half")


def test_a_folder_that_holds_no_checkpoint_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for name, fault in (("absent", "does not exist"), ("file", "has neither config.json nor"), (".", "has neither")):
        with pytest.raises(ValueError, match=f"{fault}.*; give the folder of a model, or of a checkpoint"):
            open_checkpoint(tmp_path / name)
