"""Tests that optimum, transformers and sentence-transformers give the same outputs with a HybridSession.

The tests need an environment with PyTorch, which ``.ci/run`` creates. In other environments they are skipped.
"""

from __future__ import annotations

import operator
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from sample import read_sample

from chrion import HybridSession
from random_plans import random_plan

torch = pytest.importorskip("torch", reason="optimum: no PyTorch in this environment")
hf = pytest.importorskip("transformers", reason="optimum: no transformers in this environment")
optimum = pytest.importorskip("optimum.onnxruntime", reason="optimum: no optimum-onnx in this environment")

# The libraries themselves warn.
pytestmark = pytest.mark.filterwarnings("ignore")

CPU = ["CPUExecutionProvider"]
SIZES = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXTS = ["one two three", "four"]
Make = Callable[[Path], Any]


def cut(path: Path) -> HybridSession:
    """Return a session that is cut for every shape."""
    return HybridSession(path, providers=CPU, plan=partial(random_plan, pick=Random(0), everywhere=False), strict=True)


def chosen(path: Path) -> HybridSession:
    """Return a default session."""
    return HybridSession(str(path), ort.SessionOptions(), CPU)


@pytest.fixture(params=[cut, chosen], ids=["cut", "chosen"])
def ours(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Return a function that creates sessions, which are closed after the test."""
    made: list[HybridSession] = []

    def make(path: Path) -> HybridSession:
        made.append(request.param(path))
        return made[-1]

    yield make
    for session in made:
        session.close()


def theirs(path: Path) -> ort.InferenceSession:
    return ort.InferenceSession(str(path), providers=CPU)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a BERT encoder whose outputs name the inputs' dimensions, which optimum needs to size its buffers."""
    path = read_sample("transformer_models-bert", tmp_path_factory.mktemp("bert")).model
    model = onnx.load(path)
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_param = "sequence"
    onnx.save(model, path)
    return path


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a GPT-2 decoder with past keys and values."""
    return read_sample("optimum_models-gpt2-past", tmp_path_factory.mktemp("gpt2")).model


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a tokenizer of a few words."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "one", "two", "three", "four"]
    vocabulary = tmp_path_factory.mktemp("words") / "vocab.txt"
    vocabulary.write_text("\n".join(words))
    return hf.BertTokenizer(str(vocabulary))


def features(session: Any) -> Any:
    return optimum.ORTModelForFeatureExtraction(config=hf.BertConfig(**SIZES), session=session)


def assert_close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=1e-3, atol=1e-4)


def test_a_session_is_an_inference_session(encoder: Path, ours: Make) -> None:
    """A session passes ``isinstance`` and has the private attributes that libraries read."""
    session, plain = ours(encoder), theirs(encoder)
    assert isinstance(session, ort.InferenceSession)
    for read in (
        operator.attrgetter("_model_path"),
        operator.attrgetter("_providers"),
        lambda one: [i.name for i in operator.attrgetter("_inputs_meta")(one)],
        lambda one: operator.attrgetter("_sess")(one).get_providers(),
    ):
        assert read(session) == read(plain)


@pytest.mark.parametrize("bound", [False, True], ids=["arrays", "IOBinding"])
def test_a_model_runs_with_a_session(encoder: Path, ours: Make, tokenizer: Any, *, bound: bool) -> None:
    """Outputs are equal for PyTorch tensors and numpy arrays of several shapes, with and without IOBinding."""
    model, reference = features(ours(encoder)), features(theirs(encoder))
    model.use_io_binding = bound
    for texts in (TEXTS, TEXTS[:1], ["two two two two"], TEXTS):
        tensors = tokenizer(texts, padding=True, return_tensors="pt")
        assert_close(model(**tensors).last_hidden_state, reference(**tensors).last_hidden_state)
    if not bound:
        arrays = tokenizer(TEXTS, padding=True, return_tensors="np")
        assert_close(model(**arrays).last_hidden_state, reference(**arrays).last_hidden_state)


def test_a_cut_session_stays_cut(encoder: Path, tokenizer: Any) -> None:
    """A session that optimum has used still runs its plan."""
    with cut(encoder) as session:
        model = features(session)
        model(**tokenizer(TEXTS, padding=True, return_tensors="pt"))
        assert session.plan is not None
        assert len(session.plan.segments) > 1


def test_a_pipeline_runs_with_a_session(encoder: Path, ours: Make, tokenizer: Any) -> None:
    """Feature extraction gives equal outputs for texts one at a time and in batches."""
    made = [
        hf.pipeline("feature-extraction", model=features(session), tokenizer=tokenizer)
        for session in (ours(encoder), theirs(encoder))
    ]
    for batch in (1, 2):
        found, expected = (pipe(TEXTS, batch_size=batch) for pipe in made)
        for ours_, theirs_ in zip(found, expected, strict=True):
            assert_close(ours_, theirs_)


def test_a_model_can_be_moved_to_the_cpu(encoder: Path, ours: Make) -> None:
    """``to``, which pipelines call, and ``set_providers``, which it calls for other devices, accept the CPU."""
    session = ours(encoder)
    model = features(session).to("cpu")
    assert str(model.device) == "cpu"
    session.set_providers(CPU)
    assert session.get_providers() == CPU


def test_generated_text_is_equal(decoder: Path, ours: Make) -> None:
    """A decoder generates the same tokens, with past keys and values of growing length."""
    config = hf.GPT2Config(
        vocab_size=100, n_embd=32, n_layer=2, n_head=4, n_positions=64, eos_token_id=99, pad_token_id=0
    )
    prompt = torch.tensor([[5, 6, 7], [8, 9, 1]])

    def generate(session: Any) -> Any:
        model = optimum.ORTModelForCausalLM(
            config=config, session=session, generation_config=hf.GenerationConfig(eos_token_id=99, pad_token_id=0)
        )
        return model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=5, do_sample=False)

    assert generate(ours(decoder)).tolist() == generate(theirs(decoder)).tolist()


def test_embeddings_are_equal(encoder: Path, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Embeddings of sentence-transformers do not change if optimum opens a HybridSession."""
    sentences = pytest.importorskip("sentence_transformers", reason="optimum: no sentence-transformers")
    hf.BertConfig(**SIZES).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "onnx").mkdir()
    shutil.copy(encoder, tmp_path / "onnx" / "model.onnx")
    opened: list[HybridSession] = []

    def embed() -> Any:
        kwargs = {"provider": CPU[0], "file_name": "onnx/model.onnx", "export": False}
        model = sentences.SentenceTransformer(str(tmp_path), backend="onnx", model_kwargs=kwargs)
        return model.encode([*TEXTS, "three three two"])

    def hybrid(*arguments: Any, **rest: Any) -> HybridSession:
        opened.append(HybridSession(*arguments, **rest))
        return opened[-1]

    expected = embed()
    monkeypatch.setattr("optimum.onnxruntime.modeling.InferenceSession", hybrid)
    assert_close(embed(), expected)
    assert len(opened) == 1
    opened[0].close()
