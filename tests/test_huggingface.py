"""Hugging Face folders: transformers is the judge of what is read and written."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from model_folders import REASON, named_weights, write_folder

import cache
import train_async
import train_sync
from learner import make_learner, new_groups
from logprobs import token_logprobs
from methods.lora import merged
from model import GPT, ModelConfig, pack_tokens, rope_table
from reward import task_of
from rollout import generate, make_generator
from runtime.checkpoint import load_checkpoint
from runtime.config import Config, UserError
from runtime.huggingface import base_model, export, read_shape, stored_model
from runtime.models import make_model
from runtime.terminal import run_main
from runtime.tokenizer import FolderTokenizer, own_tokenizer

transformers = pytest.importorskip("transformers", reason=REASON)
safetensors = pytest.importorskip("safetensors.torch")

ROOT = Path(__file__).parent.parent
LLAMA3 = {  # the first context is short: all three kinds of wave are there
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SHAPES = {  # tied or not; G = 1, 2, 4 query heads to a key head; heads unlike width / heads
    "tied": {"num_key_value_heads": 2, "rms_norm_eps": 1e-5},
    "untied": {"tie_word_embeddings": False, "num_key_value_heads": 4, "hidden_size": 96},
    "shared": {"num_key_value_heads": 1, "head_dim": 16, "num_hidden_layers": 3},
    "llama": {"family": "Llama", "num_key_value_heads": 2, "head_dim": 32},
    "llama3": {"family": "Llama", "rope_parameters": LLAMA3, "tie_word_embeddings": False},
    "qwen2": {"family": "Qwen2", "num_key_value_heads": 2, "head_dim": None},
}
QUICK = {"groups_per_step": 2, "group_size": 2, "slots": 4, "eval_every": 100, "steps": 2}
QUICK |= {"threads": 1}  # two processes of tests share two cores


@pytest.fixture(scope="module", params=SHAPES)
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / request.param
    return write_folder(path, shard="2MB", **SHAPES[request.param])


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("small") / "model", num_hidden_layers=2)


def config_of(model, **flags) -> Config:
    return Config(model=str(model), **{"task": "reverse:4", **QUICK, **flags})


def loaded(folder, context=80, **flags) -> GPT:
    return base_model(config_of(folder), ModelConfig(**read_shape(folder, context), **flags))


def theirs_of(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def sequences_of(count=3, longest=70, vocab=2000) -> list:
    rng = np.random.default_rng(0)
    return [rng.integers(0, vocab, n) for n in np.linspace(5, longest, count, dtype=int)]


# ----------------------------------------------------------------------------------- what is read


@torch.no_grad()
def test_logits_are_those_of_transformers_packed_prefilled_and_decoded(folder):
    assert len(list(folder.glob("*.safetensors"))) >= 2
    ours, theirs, sequences = loaded(folder), theirs_of(folder), sequences_of()
    wanted = [theirs(torch.tensor(s)[None]).logits[0] for s in sequences]
    assert max(float(x.abs().max()) for x in wanted) > 1.0  # and not all alike
    packed = ours.logits(ours(pack_tokens(sequences)))
    torch.testing.assert_close(packed, torch.cat(wanted), rtol=0, atol=1e-4)

    held = cache.make_cache(ours, slots=3, capacity=80)
    begins = [s[: len(s) // 2] for s in sequences]
    cache.prefill(ours, held, [0, 1, 2], begins)
    for step in range(5):  # of the second halves
        places = torch.tensor([len(begin) + step for begin in begins]).clamp(max=79)
        inside = [i for i, s in enumerate(sequences) if places[i] < len(s)]
        tokens = [
            int(s[min(place, len(s) - 1)]) for s, place in zip(sequences, places, strict=True)
        ]
        hidden = cache.decode(ours, held, torch.tensor(tokens), places)
        for i in inside:
            found = ours.logits(hidden[i : i + 1])[0]
            torch.testing.assert_close(found, wanted[i][places[i]], rtol=0, atol=1e-4)


@torch.no_grad()
def test_rope_is_that_of_transformers_also_at_far_positions(folder):
    """Angles that are rounded otherwise differ by 1e-3 there."""
    rotary, context = theirs_of(folder).model.rotary_emb, 20_000
    wanted = rotary(torch.ones(1), torch.arange(context)[None])
    found = rope_table(ModelConfig(**read_shape(folder, 80) | {"context": context}))
    torch.testing.assert_close(found[:, :, 0], torch.cat(wanted), rtol=0, atol=1e-5)


@torch.no_grad()
def test_greedy_generation_is_that_of_transformers(folder):
    ours, theirs = loaded(folder), theirs_of(folder)
    prompt = torch.from_numpy(sequences_of(longest=9)[2])
    how = {"max_new_tokens": 64, "do_sample": False, "eos_token_id": None}
    wanted = theirs.generate(prompt[None], attention_mask=torch.ones(1, 9), **how)[0]
    held = cache.make_cache(ours, slots=1, capacity=80)
    cache.prefill(ours, held, [0], [prompt[:-1].numpy()])
    tokens = prompt.tolist()
    for place in range(len(prompt) - 1, len(prompt) + 63):
        at = torch.tensor([place])
        hidden = cache.decode(ours, held, torch.tensor(tokens[-1:]), at)
        tokens.append(int(ours.logits(hidden).argmax()))
    assert tokens == wanted.tolist() and len({*tokens}) > 10


@torch.no_grad()
def test_export_is_read_by_transformers_and_comes_back_bitwise(folder, tmp_path):
    ours, config = loaded(folder), config_of(folder)
    export(ours, config, tmp_path / "out")
    theirs, sequence = theirs_of(tmp_path / "out"), sequences_of()[2]
    assert theirs.config.max_position_embeddings == 512  # the folder's, not the run's
    wanted = theirs_of(folder)(torch.tensor(sequence)[None]).logits
    assert torch.equal(theirs(torch.tensor(sequence)[None]).logits, wanted)
    theirs.save_pretrained(tmp_path / "again", max_shard_size="1MB")
    (tmp_path / "again/tokenizer.json").write_bytes((tmp_path / "out/tokenizer.json").read_bytes())
    assert torch.equal(loaded(tmp_path / "again").flat, ours.flat)
    assert FolderTokenizer(tmp_path / "out").stop == FolderTokenizer(folder).stop
    auto = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert auto("def train(config): 42")["input_ids"] == encoded(folder, "def train(config): 42")


def encoded(folder, text) -> list[int]:
    return FolderTokenizer(folder).encode(text)


def test_bfloat16_is_exact_both_ways(tmp_path):
    folder = write_folder(tmp_path / "in", num_hidden_layers=1, dtype=torch.bfloat16)
    ours = loaded(folder)
    assert ours.flat.dtype == torch.float32 and torch.equal(ours.flat, ours.flat.bfloat16().float())
    export(ours, config_of(folder, dtype="bfloat16"), tmp_path / "out")
    found = safetensors.load_file(tmp_path / "out/model.safetensors")
    assert {x.dtype for x in found.values()} == {torch.bfloat16}
    assert torch.equal(loaded(tmp_path / "out").flat, ours.flat)


def test_sums_of_float16_may_be_larger_than_a_float16(small, tmp_path):
    copy_folder(small, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = safetensors.load_file(path)
    name = "model.embed_tokens.weight"
    tensors[name] = torch.full_like(tensors[name], 9.0).half()
    safetensors.save_file(tensors, path)
    assert (loaded(tmp_path).embed_tokens.weight == 9).all()
    for wrong in (float("nan"), float("inf"), -float("inf")):
        tensors[name][3, 5] = wrong
        safetensors.save_file(tensors, path)
        with pytest.raises(UserError, match="embed_tokens.weight .*must be finite"):
            loaded(tmp_path)


def test_a_tied_folder_may_have_the_output_matrix_twice(small, tmp_path):
    copy_folder(small, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = safetensors.load_file(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    safetensors.save_file(tensors, path)
    assert torch.equal(loaded(tmp_path).flat, loaded(small).flat)
    tensors["lm_head.weight"][0, 0] += 1
    safetensors.save_file(tensors, path)
    with pytest.raises(UserError, match="lm_head.weight: must be the embeddings"):
        loaded(tmp_path)


MEMORY = """
import sys
from pathlib import Path
import torch
from model import GPT, ModelConfig
from runtime.huggingface import load_weights, read_shape

def peak():
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmHWM")) << 10

folder = Path(sys.argv[1])
model = GPT(ModelConfig(**read_shape(folder, 64)), None, torch.bfloat16)
model.flat.fill_(0)  # now its memory is there
before = peak()
load_weights(model, folder)
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_takes_no_more_memory_than_the_model_and_its_largest_tensor(tmp_path):
    """150 MB in shards: beside the model there is never more than one tensor."""
    shape = {"vocab_size": 16000, "hidden_size": 1024, "intermediate_size": 4096, "head_dim": 128}
    big = write_folder(tmp_path / "big", **shape, dtype=torch.bfloat16, shard="64MB")
    assert sum(file.stat().st_size for file in big.glob("*.safetensors")) > 120e6
    command = [sys.executable, "-c", MEMORY, str(big)]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    largest, more = 16000 * 1024 * 2, int(said.stdout)
    assert more < largest + (8 << 20), f"{more >> 20} MB beside the model"


# --------------------------------------------------------------------------------- what is refused


def copy_folder(source: Path, target: Path) -> Path:
    target.mkdir(exist_ok=True)
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def change_json(path: Path, **values) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def refusal(folder, **flags) -> str:
    """The one line with which a run refuses to begin."""
    config = config_of(folder, **flags)
    with pytest.raises(UserError) as error:
        make_model(config, task_of(config))
    return " ".join(str(error.value).split())


REFUSED = {
    "model_type": "mistral",
    "mlp_bias": True,
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_act": "gelu",
    "attention_bias": True,
    "use_sliding_window": True,
    "layer_types": ["full_attention", "sliding_attention"],
    "quantization_config": {"quant_method": "gptq"},
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
    "rope_parameters": {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0},
    "vocab_size": 1000,  # fewer than the tokenizer has
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_changes_the_computation_is_refused_by_name(small, tmp_path, name):
    copy_folder(small, tmp_path)
    value = REFUSED[name]
    change_json(tmp_path / "config.json", **{name: value})
    line = refusal(tmp_path)
    inner = next((str(v) for v in value.values()), "") if isinstance(value, dict) else ""
    assert name in line or inner and inner in line, line
    assert str(tmp_path) in line


def test_the_old_and_the_new_way_to_write_the_rotary_base_are_read(small, tmp_path):
    copy_folder(small, tmp_path)
    path = tmp_path / "config.json"
    facts = json.loads(path.read_text())
    facts["rope_theta"] = facts.pop("rope_parameters")["rope_theta"]
    path.write_text(json.dumps(facts | {"rope_scaling": None}))
    assert read_shape(tmp_path, 8) == read_shape(small, 8)
    assert read_shape(tmp_path, 8)["rope_base"] == 1e6


def drop(name):
    return lambda folder: (folder / name).unlink()


def cut_short(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def change_tensors(change):
    def apply(folder):
        tensors = safetensors.load_file(folder / "model.safetensors")
        change(tensors)
        safetensors.save_file(tensors, folder / "model.safetensors")

    return apply


def index_of(file):
    def apply(folder):
        names = safetensors.load_file(folder / "model.safetensors")
        text = json.dumps({"weight_map": dict.fromkeys(names, file)})
        (folder / "model.safetensors.index.json").write_text(text)

    return apply


def link(folder):
    (folder / "model.safetensors").rename(folder.parent / "elsewhere")
    (folder / "model.safetensors").symlink_to(folder.parent / "elsewhere")


NORM = "model.norm.weight"
DAMAGED = {
    "no config": (drop("config.json"), "config.json: must be a file"),
    "no weights": (
        drop("model.safetensors"),
        "missing, or none of its own: .*model.embed_tokens.weight",
    ),
    "no tokenizer": (
        drop("tokenizer.json"),
        "tokenizer.json: must be what the library tokenizers reads",
    ),
    "truncated": (cut_short, "model.safetensors: must be a whole safetensors file"),
    "missing": (change_tensors(lambda t: t.pop(NORM)), f"missing, or .*{NORM}"),
    "more": (change_tensors(lambda t: t.update(x=torch.ones(1))), "none of its own: .*'x'"),
    "shape": (change_tensors(lambda t: t.update({NORM: torch.ones(3)})), r"\[3\]: must be finite"),
    "link": (link, "must be no link to another folder .`cp -rL`"),
    "no JSON": (lambda folder: (folder / "config.json").write_text("{"), "must be JSON"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_folder_costs_one_line(small, tmp_path, name):
    damage, words = DAMAGED[name]
    damage(copy_folder(small, tmp_path / "model"))
    assert re.search(words, refusal(tmp_path / "model"))


def test_a_snapshot_of_a_hubs_cache_and_a_clone_are_read(small, tmp_path):
    """Files of a snapshot are links to its blobs; a clone has .git."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    copy_folder(small, blobs)
    snapshot.mkdir(parents=True)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    (snapshot / ".git").mkdir()
    (snapshot / ".git" / "odd.json").symlink_to("/etc/passwd")
    assert torch.equal(loaded(snapshot).flat, loaded(small).flat)


@pytest.mark.parametrize("file", ["model-00007.safetensors", "../elsewhere", "/etc/passwd", 7])
def test_what_an_index_says_is_not_followed(small, tmp_path, file):
    index_of(file)(copy_folder(small, tmp_path))
    assert torch.equal(loaded(tmp_path).flat, loaded(small).flat)


def test_what_lies_beside_the_weights_is_not_read(small, tmp_path):
    folder = copy_folder(small, tmp_path / "model")
    safetensors.save_file({"x": torch.ones(1)}, folder / "adapter_model.safetensors")
    (folder / "._model.safetensors").write_bytes(b"of macOS")
    assert torch.equal(loaded(folder).flat, loaded(small).flat)


def test_flags_that_do_not_fit_a_folder_are_refused(small, tmp_path, capsys, monkeypatch):
    with pytest.raises(UserError, match="config.json: an episode of 513 tokens: .*at most 512"):
        read_shape(small, 513)
    with pytest.raises(UserError, match="--lora 2: must be 0 with --init"):
        config = config_of(small, lora=2, init="x")
        make_model(config, task_of(config))
    folder = ["--model", str(small)]
    nothing = "--model /nowhere: must be tiny, small, medium or a Hugging Face folder "
    for flags, words in [
        (["--model", "/proc"], f"{nothing.replace('/nowhere', '/proc')}(config.json"),
        (["--model", "/nowhere"], f"{nothing}(config.json, *.safetensors, tokenizer.json)"),
        ([*folder, "--positions", "rope"], f"--positions rope: must be 'learned' with {folder[0]}"),
        ([*folder, "--set", "qk_norm=yes"], "--set=qk_norm=yes: must be 'no' with"),
        (["--chat", "yes"], "--chat yes: must be no with tiny"),
        ([*folder, "--system", "x"], "--system x: must be left out with --chat no"),
    ]:
        line = ["train_sync.py", "--task", "reverse:4", "--out", str(tmp_path / "run"), *flags]
        monkeypatch.setattr(sys, "argv", line)
        with pytest.raises(SystemExit) as stop:
            run_main(train_sync.train, "")
        said = capsys.readouterr().err
        assert stop.value.code == 2 and words in said and said.count("\n") == 1, said
        assert not (tmp_path / "run").exists()


def test_a_real_command_line_ends_with_one_line_and_code_2(small, tmp_path):
    cut_short(copy_folder(small, tmp_path / "model"))
    command = [sys.executable, "train_sync.py", "--model", str(tmp_path / "model")]
    command += ["--task", "reverse:4", "--out", str(tmp_path / "run")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "must be a whole safetensors file" in done.stderr and not done.stdout
    assert not (tmp_path / "run").exists()


# ------------------------------------------------------------------------------------------- runs


def test_a_run_on_a_folder_is_exported_and_goes_on(small, tmp_path):
    run, out = tmp_path / "run", tmp_path / "out"
    train_sync.train(config_of(small, out=str(run), chat="yes"))
    text = export(*stored_model(run), out)
    assert text == f"{out}: the model in float32, for transformers, its attention dense"
    state = load_checkpoint(run)
    assert torch.equal(loaded(out).flat, state["weights"])
    assert not torch.equal(loaded(small).flat, state["weights"])
    train_sync.train(dataclasses.replace(Config(), resume=str(run), steps=3))
    export(*stored_model(run), tmp_path / "more")
    assert torch.equal(loaded(tmp_path / "more").flat, load_checkpoint(run)["weights"])


def test_where_nothing_can_be_exported_to(small):
    config = config_of(small)
    model = make_model(config, task_of(config))
    with pytest.raises(UserError, match="must be new or an empty folder"):
        export(model, config, small)
    with pytest.raises(NotADirectoryError, match="config.json/x"):
        export(model, config, small / "config.json" / "x")


def test_an_asynchronous_run_on_a_folder_with_sparse_attention(small, tmp_path):
    flags = {"attention": "dsa", "chunk_size": 4, "top_k": 2, "rollout_workers": 1}
    run, out = tmp_path / "run", tmp_path / "out"
    train_async.train(config_of(small, out=str(run), lora=2, **flags))
    assert "for transformers, its attention dense" in export(*stored_model(run), out)
    assert theirs_of(out).config.num_hidden_layers == 2


def test_an_indexer_is_random_in_a_folders_model_and_is_not_exported(small, tmp_path):
    config = config_of(small, attention="dsa", scoring="indexer")
    model = make_model(config, task_of(config))
    index = [p for n, p in model.named_parameters() if "indexer" in n and p.dim() == 2]
    assert index and all(0.01 < float(p.detach().std()) < 1.0 for p in index)
    plain = named_weights(loaded(small))
    assert all(torch.equal(named_weights(model)[name], plain[name]) for name in plain)
    with pytest.raises(UserError, match="not scoring=indexer"):
        export(model, config, tmp_path / "out")


@torch.no_grad()
def test_a_preset_of_qwen3s_form_is_exported_with_its_vocabulary(tmp_path):
    flags = {"positions": "rope", "qk_norm": "yes", "task": "sort:4"}
    config = config_of("tiny", **flags)
    model = make_model(config, task_of(config))
    for name, view in named_weights(model).items():
        if "norm" in name:
            view.uniform_(0.5, 1.5)
    export(model, config, tmp_path / "out")
    text = "sort 4 2 17 99 100 :\n<|end|> 3.14 naïve 人  \n\n the reverse"
    ids = own_tokenizer().encode(text)
    wanted = model.logits(model(pack_tokens([ids[: model.config.context]])))
    theirs = theirs_of(tmp_path / "out")
    found = theirs(torch.tensor(ids[: model.config.context])[None]).logits[0]
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
    assert theirs.config.rope_parameters["rope_theta"] == 10_000.0

    twin = FolderTokenizer(tmp_path / "out")
    assert twin.stop == own_tokenizer().stop and twin.alphabet == own_tokenizer().alphabet
    auto = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (auto.eos_token_id, auto.pad_token_id) == (510, 511)
    for other in [text, "7 12 007 1 2 3", *Path(__file__).read_text().splitlines()[:200]]:
        assert twin.encode(other) == own_tokenizer().encode(other)
        plain = other.replace("<|end|>", "")
        assert auto(plain)["input_ids"] == own_tokenizer().encode(plain)
    again = config_of(tmp_path / "out", task="sort:4")
    assert torch.equal(make_model(again, task_of(again)).flat, model.flat)


@torch.no_grad()
def test_adapters_are_merged(small, tmp_path):
    config = config_of(small, lora=3)
    model = make_model(config, task_of(config))
    assert len(model.flat) < len(model.frozen) / 10
    model.flat.normal_(std=0.1)
    sequences = sequences_of(longest=10)
    wanted = model.logits(model(pack_tokens(sequences)))
    export(model, config, tmp_path / "merged")
    theirs = theirs_of(tmp_path / "merged")
    found = torch.cat([theirs(torch.tensor(s)[None]).logits[0] for s in sequences])
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


def test_a_run_with_adapters_is_exported_from_its_checkpoint(small, tmp_path):
    run, out = tmp_path / "run", tmp_path / "out"
    train_sync.train(config_of(small, out=str(run), lora=2, dtype="bfloat16"))
    assert len(load_checkpoint(run)["weights"]) < 100_000
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "runtime.huggingface", str(run), str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and "for transformers" in done.stdout, done.stderr
    model, _ = stored_model(run)
    assert model.flat.dtype == torch.float32  # bfloat16 would lose most of what they add
    wanted = named_weights(merged(model))
    assert all(torch.equal(x, wanted[name]) for name, x in named_weights(loaded(out)).items())
    assert not torch.equal(loaded(out).flat, loaded(small).flat)
    train_sync.train(dataclasses.replace(Config(), resume=str(run), steps=3))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "must be new or an empty folder" in done.stderr


def test_an_untied_output_matrix_generates_what_is_trained(tmp_path):
    folder = write_folder(tmp_path / "model", num_hidden_layers=1, tie_word_embeddings=False)
    config = config_of(folder)
    task = task_of(config)
    learner = make_learner(config, task, make_model(config, task))
    generator = make_generator(config, task, learner.model)
    (group,) = generate(generator, new_groups(learner, task, 1))
    batch = [(trajectory, 0.0) for trajectory in group.trajectories]
    with torch.no_grad():
        trained, *_ = token_logprobs(learner.model, batch, learner, config)
    sampled = np.concatenate([t.logprobs[t.loss_mask] for t in group.trajectories])
    np.testing.assert_allclose(sampled, trained.numpy(), atol=1e-4)


def test_weights_of_a_file_must_have_room_for_the_folders_vocabulary(small, tmp_path):
    shape = ModelConfig(layers=1, width=8, heads=1, kv_heads=1, head_width=8, hidden=8)
    model = GPT(shape)
    torch.save({"shape": vars(shape), "weights": model.flat}, tmp_path / "weights.pt")
    config = config_of(small, init=str(tmp_path / "weights.pt"))
    with pytest.raises(UserError, match="512 tokens, and 2000 of --model"):
        make_model(config, task_of(config))


def test_a_shape_larger_than_any_memory_costs_one_line(small, tmp_path):
    change_json(
        copy_folder(small, tmp_path) / "config.json", hidden_size=1 << 23, vocab_size=1 << 23
    )
    assert "must fit into memory" in refusal(tmp_path)
