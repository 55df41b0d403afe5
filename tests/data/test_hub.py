"""Names of the hub, against a stand-in over real HTTP: pinned, cached, refused in words, hostile, slow, interrupted."""

from __future__ import annotations

import glob
import re
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest
from tests.harness.hub import Asker, Hub

from myxa.core.config import RunConfig, load_config
from myxa.core.errors import ConfigError

CONFIG = {"config.json": b"{}", "tokenizer.json": b"{}"}
MODEL = {**CONFIG, "model.safetensors": b"w" * 300_000, "pytorch_model.bin": b"no", "onnx/model.safetensors": b"no"}
CARD = b"""---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: [main/test-0.jsonl, main/test-1.jsonl]}
- config_name: socratic
  data_files: {train: socratic/train.jsonl}
---
# rows
"""
BOMB = f"""---
a: &a [{"x, " * 500}]
b: &b [{"{path: *a}, " * 500}]
configs: [{"{data_files: *b}, " * 500}]
---
""".encode()
"""A few KB that say 125 million files."""
ROWS = {
    "README.md": CARD,
    **{f"{name}.jsonl": b"{}\n" for name in ("main/train-0", "main/train-1", "main/test-0", "main/test-1")},
    "socratic/train.jsonl": b"{}\n",
}


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    hub = Hub()
    hub.add("models", "acme/tiny", MODEL, tags=("v1", "team/try+1"))
    deep = b'---\nconfigs:\n- data_files: "**/*.jsonl"\n---\n'
    hub.add("datasets", "acme/deep", {"README.md": deep, "a.jsonl": b"{}\n", "b/c/d.jsonl": b"{}\n"})
    hub.add("models", "acme/bin", {**CONFIG, "pytorch_model.bin": b"no"})
    hub.add("models", "acme/gated", MODEL, status=403)
    hub.add("models", "acme/login", MODEL, status=401)
    hub.add("models", "acme/large", MODEL, sizes={"model.safetensors": 257 << 20})
    hub.add("datasets", "acme/large", {"rows.jsonl": b"{}"}, sizes={"rows.jsonl": 258 << 20})
    hub.add("models", "acme/wordy", MODEL, sizes={"config.json": 1 << 40})
    hub.add("datasets", "acme/wordy", {"README.md": CARD, "a.jsonl": b"{}"}, sizes={"README.md": 1 << 40})
    hub.add("datasets", "acme/bomb", {"README.md": BOMB, "a.jsonl": b"{}\n", "b.jsonl": b"{}\n"})
    hub.add("models", "acme/huge", MODEL, sizes={"model.safetensors": 1 << 60})
    hub.add("datasets", "acme/rows", ROWS, tags=("team/rows",))
    hub.add("datasets", "acme/one", {"data/rows.jsonl": b"{}\n", "dataset_infos.json": b"{}", "x.py": b"no"})
    hub.add("datasets", "acme/two", {"README.md": b"---\nconfigs: 7\n---\n", "a.jsonl": b"{}\n", "b.jsonl": b"{}\n"})
    up = b'---\nconfigs:\n- data_files: "../../*.jsonl"\n---\n'
    hub.add("datasets", "acme/up", {"README.md": up, "a.jsonl": b"{}\n"})
    out = b'---\nconfigs:\n- data_files: "*.jsonl"\n---\n'
    hub.add("datasets", "acme/out", {"README.md": out, "a.jsonl": b"{}\n", "../../../../out.jsonl": b"{}\n"})
    with hub.serving():
        yield hub


@pytest.fixture(scope="module")
def asker(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asker]:
    with Asker(hub, tmp_path_factory.mktemp("hub") / "home") as asker:
        yield asker


def test_a_model_is_pinned_and_lies_in_the_cache_without_what_is_not_read(hub: Hub, tmp_path: Path) -> None:
    commit = hub.repos["models", "acme/tiny"].commit
    names = ("acme/tiny", "acme/tiny@v1", "acme/tiny@team/try+1", "acme/tiny@team%2Ftry+1", f"acme/tiny@{commit}")
    with Asker(hub, tmp_path / "home") as asker:
        for name in names:
            found = asker.fetched(model=f"hf://{name}")
            assert found["model"] == f"hf://acme/tiny@{commit}"
            held = {str(one.relative_to(found["paths"][0])) for one in Path(found["paths"][0]).rglob("*")}
            assert held == {*CONFIG, "model.safetensors"}
        before = len(hub.asked)
        assert asker.fetched(model=f"hf://acme/tiny@{commit}")["said"] == []
        assert hub.asked[before:] == [], "what is pinned and whole asks nothing"
        assert asker.said_aloud() == "", "no bars and no warnings where there is no terminal"


def test_a_frozen_file_means_the_same_files(hub: Hub, asker: Asker, tmp_path: Path) -> None:
    found = asker.fetched(model="hf://acme/tiny", train=["hf://datasets/acme/rows:test", "/other.jsonl"])
    file = tmp_path / "run.toml"
    file.write_text(found["dump"])
    again = load_config(file)
    assert [again.model.path, list(again.data.train)] == [found["model"], found["train"]]
    commit = hub.repos["datasets", "acme/rows"].commit
    name = f"hf://datasets/acme/rows@{commit}/main/test"
    assert found["train"] == [f"{name}-0.jsonl", f"{name}-1.jsonl", "/other.jsonl"]
    assert all(Path(one).is_file() for one in found["paths"][1][:2])


def test_every_key_of_a_model_or_of_data_takes_names(asker: Asker) -> None:
    found = asker.fetched(
        model="hf://acme/tiny",
        train="",
        data={"sources": {"a": {"path": ["hf://datasets/acme/rows:test", "/b.jsonl"]}}},
        eval={"sets": {"c": {"path": "hf://datasets/acme/one"}}, "every": 1},
        models={"user": {"path": "hf://acme/tiny@v1"}},
        algo={"kind": "ppo", "kl_coef": 0.1, "ref_path": "hf://acme/tiny"},
        critic={"enabled": True, "path": "hf://acme/tiny"},
    )
    assert "error" not in found, found
    names = re.findall(r'"(hf://[^"]*)"', found["dump"])
    assert len(names) == 7 and all(re.search("@[0-9a-f]{40}", one) for one in names), names


def plain(pattern: str) -> str:
    return pattern.partition("@[")[0].replace("**/", "")


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("acme/rows:main:train", "main/train-*"),
        ("acme/rows:socratic", "socratic/train.jsonl"),
        ("acme/rows:main:train@[1:5]", "main/train-*@[1:5]"),
        ("acme/rows/main/*-0.jsonl", "main/*-0.jsonl"),
        ("acme/rows@team%2Frows:main:train", "main/train-*"),
        ("acme/rows@team%2Frows/main/*-0.jsonl", "main/*-0.jsonl"),
        ("acme/one", "data/rows.jsonl"),
        ("acme/deep", "**/*.jsonl"),
    ],
)
def test_a_split_is_a_pattern_of_files(hub: Hub, asker: Asker, name: str, files: str) -> None:
    found = asker.fetched(train=f"hf://datasets/{name}")
    repo = re.split("[:/@]", name)[1]
    assert found["train"] == f"hf://datasets/acme/{repo}@{hub.repos['datasets', f'acme/{repo}'].commit}/{files}"
    (snapshot,) = asker.home.glob(f"hub/datasets--acme--{repo}/snapshots/*")
    wanted = {path for path in hub.repos["datasets", f"acme/{repo}"].files if PurePosixPath(path).match(plain(files))}
    named = glob.glob(found["paths"][1].partition("@[")[0], recursive=True)
    assert wanted and {str(Path(one).relative_to(snapshot)) for one in named} == wanted


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ({"model": "acme/none"}, ["has no model acme/none, or it is private", "hf auth login", "beside the run file"]),
        ({"model": "acme/tiny@v9"}, ["has no revision v9"]),
        ({"model": "acme/gated"}, ["is gated", "HF_TOKEN"]),
        ({"model": "acme/login"}, ["is gated", "HF_TOKEN"]),
        ({"model": "acme/bin"}, ["has no safetensors files", "pytorch_model.bin"]),
        ({"train": "datasets/acme/none"}, ["has no data set acme/none"]),
        ({"train": "datasets/acme/rows"}, ["could be several", "main:train", "socratic:train"]),
        ({"train": "datasets/acme/rows:main:trian"}, ["is none of its splits", 'did you mean "main:train"']),
        ({"train": "datasets/acme/rows:test@[0:5]"}, ["is of several patterns", "name one"]),
        ({"train": "datasets/acme/rows/x/*.jsonl"}, ["has no file x/*.jsonl"]),
        ({"train": "datasets/acme/two"}, ["names no splits", "a.jsonl, b.jsonl", "/a.jsonl"]),
        ({"train": "datasets/acme/bomb"}, ["names no splits", "a.jsonl, b.jsonl"]),
        ({"train": "datasets/acme/wordy"}, ["1024.0 GiB of README.md, .gitattributes"]),
        ({"model": "acme/wordy"}, ["1024.0 GiB of *.json"]),
        ({"train": "datasets/acme/up"}, ["names files outside of it", "do not use"]),
        ({"train": "datasets/acme/out"}, ["out.jsonl", "'..'"]),
    ],
)
def test_what_cannot_be_had_is_refused_in_words(asker: Asker, named: dict[str, str], says: list[str]) -> None:
    found = asker.fetched(**{key: f"hf://{value}" for key, value in named.items()})
    key = "model.path" if "model" in named else "data.train"
    assert found["kind"] == "ConfigError" and found["error"].startswith(f"{key}: ")
    assert all(one in found["error"] for one in says), found["error"]
    assert not list(asker.home.parent.rglob("out.jsonl"))


def test_several_at_once_are_all_told(asker: Asker) -> None:
    found = asker.fetched(model="hf://acme/none", train="hf://datasets/acme/none")
    assert "model.path" in found["error"] and "data.train" in found["error"]


MODELS = ("a", "a/b/c", "a/b@", "../b", "a/b@..", "a/b@refs/pr/..", "a/b@x y", "datasets/a/b")


@pytest.mark.parametrize(
    ("name", "key"),
    [*((name, "path") for name in MODELS),
     *((f"datasets/{name}", "train") for name in ("a", "a/b:c:d:e", "a/b/../../c.jsonl", "a/b/.", "a/b/x@[1:2]y"))],
)  # fmt: skip
def test_what_is_no_name_is_no_configuration(name: str, key: str) -> None:
    named = {"path": "m", "train": "t.jsonl", key: f"hf://{name}"}
    with pytest.raises(
        ValueError, match=f"must look like hf://{'datasets/' if key == 'train' else 'org/name@revision'}"
    ):
        RunConfig.model_validate({"model": {"path": named["path"]}, "data": {"train": named["train"]}})


def test_folders_win_over_names(tmp_path: Path) -> None:
    (tmp_path / "acme" / "tiny").mkdir(parents=True)
    (tmp_path / "run.toml").write_text(
        '[model]\npath = "acme/tiny"\n[data]\ntrain = ["org/rows:x@[:9]", "acme/x", "a/b.jsonl"]\n'
    )
    config = load_config(tmp_path / "run.toml")
    assert config.model.path == str(tmp_path / "acme/tiny")
    assert config.data.train == ("hf://datasets/org/rows:x@[:9]", str(tmp_path / "acme/x"), str(tmp_path / "a/b.jsonl"))
    for path in ("./org/none", "acme/none", "acme/none/deeper", "/acme/none"):
        (tmp_path / "run.toml").write_text(f'[model]\npath = "{path}"\n[data]\ntrain = "t.jsonl"\n')
        assert load_config(tmp_path / "run.toml").model.path == str((tmp_path / path).resolve())
    (tmp_path / "run.toml").write_text('[model]\npath = "org/none@a b"\n[data]\ntrain = "hf://datasets/a"\n')
    with pytest.raises(ConfigError, match=r"data\.train"):
        load_config(tmp_path / "run.toml")


def test_plan_leaves_large_files_and_says_how_large(hub: Hub, asker: Asker) -> None:
    before = len(hub.asked)
    found = asker.ask("looked_up", model="hf://acme/large", train="hf://datasets/acme/large")
    assert found["said"] == [["model.path", 257 << 20], ["data.train", 258 << 20]]
    assert {one.name for one in Path(found["paths"][0]).iterdir()} == set(CONFIG)
    said = asker.ask("looked_up", model="hf://acme/wordy", train="hf://datasets/acme/wordy")["said"]
    assert all("which should be small" in one[1] for one in said)
    assert not [one for one in hub.asked[before:] if re.match("GET .*(safetensors|jsonl|acme/wordy/resolve)", one)]
    assert asker.ask("looked_up", model="hf://acme/tiny")["said"] == [["model.path", 0]]


def test_what_does_not_fit_on_the_disk_is_not_begun(hub: Hub, asker: Asker) -> None:
    for call in ("fetched", "looked_up"):
        found = asker.ask(call, model="hf://acme/huge")
        text = found.get("error") or found["said"][-1][1]
        assert "needs 1073741824.0 GiB" in text and "HF_HOME" in text
    assert not [one for one in hub.asked if re.match("GET .*huge.*safetensors", one)]


def test_what_is_left_out_is_added_up_once(hub: Hub, asker: Asker) -> None:
    most = {"model.safetensors": int(shutil.disk_usage(asker.home).free * 0.6)}
    for name in ("acme/most", "acme/more"):
        hub.add("models", name, MODEL, sizes=most)
    named = {"model": "hf://acme/most", "algo": {"kl_coef": 0.1, "ref_path": "hf://acme/most"}}
    assert [one[1] for one in asker.ask("looked_up", **named)["said"]] == [most["model.safetensors"]] * 2
    named["algo"] = {"kl_coef": 0.1, "ref_path": "hf://acme/more"}
    assert "needs" in asker.ask("looked_up", **named)["said"][-1][1]


def test_a_broken_download_keeps_whole_files(hub: Hub, asker: Asker) -> None:
    first, second = bytes(100_000), bytes(range(256)) * 4000
    files = {**CONFIG, "a.safetensors": first, "b.safetensors": second}
    cut = hub.add("models", "acme/cut", files, cut_after=200_000, num_cuts=99)
    found = asker.fetched(model="hf://acme/cut")
    assert "cannot be fetched: " in found["error"] and "try again" in found["error"]
    cut.num_cuts, before = 2, len(hub.asked)
    found = asker.fetched(model="hf://acme/cut")  # a break or two is nothing
    assert Path(found["paths"][0], "b.safetensors").read_bytes() == second
    assert not [one for one in hub.asked[before:] if re.match("GET .*/a.safetensors", one)]


def test_a_slow_download_is_seen_to_grow(hub: Hub, asker: Asker) -> None:
    """Nodes wait for each other as long as what is said changes."""
    hub.add("models", "acme/slow", {**CONFIG, "model.safetensors": bytes(7 << 19)}, pause_s=0.01)
    done = [text for text in asker.fetched(model="hf://acme/slow")["done"] if "MiB fetched of" in text]
    assert len({*done}) > 2, done


def test_a_hub_that_does_not_answer_has_a_deadline(hub: Hub, tmp_path: Path) -> None:
    with Asker(hub, tmp_path / "home", HF_HUB_DOWNLOAD_TIMEOUT="1") as asker:
        hub.is_silent, before = True, len(hub.asked)
        try:
            found = asker.fetched(model="hf://acme/tiny", train=[f"hf://datasets/acme/{one}" for one in "abc"])
        finally:
            hub.is_silent = False
        assert found["error"].count("does not answer: timed out") == 4
        asked = [one for one in hub.asked[before:] if "/acme/" in one]
        assert len(asked) == 1, "one wait, however many names"
        assert asker.fetched(model="hf://acme/tiny")["model"], "it is asked again another time"


def test_what_a_proxy_answers_is_told(hub: Hub, asker: Asker) -> None:
    hub.status = 404
    try:
        found = asker.fetched(model="hf://acme/unseen")
    finally:
        hub.status = 0
    assert f"{hub.url} answers Client error '404 Not Found'" in found["error"]


def test_without_network_the_cache_counts(hub: Hub, asker: Asker) -> None:
    whole = {"model": "hf://acme/tiny", "train": "hf://datasets/acme/rows:main:test"}
    found = asker.fetched(**whole)
    asker.ask("looked_up", model="hf://acme/large")
    weights, before = Path(found["paths"][0]) / "model.safetensors", len(hub.asked)
    with Asker(hub, asker.home, HF_ENDPOINT="http://me:s3cr3t@127.0.0.1:9") as lost:
        assert lost.fetched(**whole)["paths"] == found["paths"]
        error = lost.fetched(model="hf://acme/none")["error"]
        assert "http://127.0.0.1:9 does not answer" in error and "s3cr3t" not in error
    with Asker(hub, asker.home, HF_HUB_OFFLINE="1") as offline:
        assert offline.fetched(**whole)["model"] == found["model"]
        pinned = offline.fetched(model=found["model"], train=found["train"])
        assert (pinned["paths"], pinned["said"]) == (found["paths"], [])
        for name in ("acme/none", "acme/large"):
            error = offline.fetched(model=f"hf://{name}")["error"]
            assert f"model {name} is not whole in the cache, and HF_HUB_OFFLINE is set" in error
        weights.unlink()
        assert "is not whole in the cache" in offline.fetched(**whole)["error"]
    assert hub.asked[before:] == []
    asker.fetched(model=found["model"])
    assert weights.is_file(), "what was lost is there again"
