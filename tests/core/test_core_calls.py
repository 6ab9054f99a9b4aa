"""Calls, requests and responses: documented defaults, and values that survive pickling."""

import pickle
from dataclasses import fields as fields_of
from typing import Any

import numpy as np
import pytest

from dragoman.core.callers import ANYONE
from dragoman.core.calls import (
    ApplyHessian,
    ApplyJacobian,
    Generate,
    Gradient,
    Handle,
    Handled,
    Index,
    Infer,
    Inference,
    Load,
    ModelDescription,
    Request,
    Response,
    ScaleModel,
    Unload,
)
from dragoman.core.model import Model
from dragoman.core.signature import OPEN, Signature
from dragoman.core.spec import ModelSpec
from dragoman.core.tensor import NONE, Tensor
from dragoman.core.text import Chat, PromptInfo, Sampling, Text, Token
from dragoman.system.call_times import CallTimes

X = Tensor.of(np.array([1.0, 2.0]))


def field_values(value: Any) -> dict[str, Any]:
    names = getattr(value, "__struct_fields__", None) or [each.name for each in fields_of(value)]
    return {name: getattr(value, name) for name in names}


def test_sampling_is_neutral_by_default() -> None:
    assert field_values(Sampling()) == {
        "max_new_tokens": None,
        "shorten": False,
        "min_new_tokens": 0,
        "do_sample": False,
        "seed": None,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "typical_p": 1.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "n": 1,
        "best_of": 0,
        "num_beams": 1,
        "length_penalty": 1.0,
        "early_stopping": False,
        "stop": (),
        "stop_token_ids": (),
        "include_stop": False,
        "ignore_eos": False,
        "bad_words": (),
        "logit_bias": {},
        "allowed_token_ids": (),
        "top_logprobs": 0,
        "prompt_logprobs": None,
        "truncate": None,
        "truncation_side": "left",
        "prompt_token_ids": False,
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "grammar": None,
        "adapter": "",
        "model_defaults": frozenset(),
        "adapters": (),
        "cache_salt": "",
    }


def test_texts_and_chats_have_defaults() -> None:
    assert field_values(Chat(())) == {
        "messages": (),
        "tools": (),
        "options": {},
        "add_generation_prompt": True,
        "special_tokens": False,
        "template": "",
        "drops_turns": False,
    }
    values = {"id": 1, "text": "a", "logprob": None, "special": False, "top": (), "data": b""}
    assert field_values(Token(1, "a")) == values
    assert field_values(Text()) == {
        "prompt": 0,
        "choice": 0,
        "text": "",
        "tokens": (),
        "generated": 0,
        "finish": "",
        "stop": None,
        "whole": "",
        "seed": None,
        "took_s": None,
    }
    assert Text(whole="a", took_s=0.5) == Text(whole="a", took_s=0.25) != Text(whole="b", took_s=0.5)
    assert hash(Text(whole="a", took_s=0.5)) == hash(Text(whole="a"))
    assert field_values(PromptInfo("p", 3)) == {
        "text": "p",
        "tokens": 3,
        "cached": 0,
        "prefill": (),
        "read_s": None,
        "waited_s": None,
        "checked_s": None,
        "max_new": None,
        "token_ids": (),
        "temperature": None,
        "top_p": None,
    }
    assert PromptInfo("p", 3, waited_s=0.5, checked_s=0.5, read_s=0.5) == PromptInfo("p", 3) != PromptInfo("p", 4)
    assert Generate(prompts=("p",)) == Generate(prompts=("p",), sampling=Sampling(), stream=False)


def test_model_specs_have_documented_defaults() -> None:
    spec = field_values(ModelSpec(name="m"))
    settings = {
        "placement": "",
        "replicas": 1,
        "max_batch_size": 0,
        "max_batch_wait_s": 0.0,
        "batch_linger": 0.5,
        "max_queue": 1024,
        "timeout_s": 0.0,
        "cancel_grace_s": 10.0,
        "allow_pickle": False,
        "inputs": (),
        "outputs": (),
        "parameters": {},
        "protocols": {},
        "target": None,
        "siblings": None,
    }
    assert settings.items() <= spec.items()
    assert {spec[name] for name in ("version", "runtime", "uri", "url", "platform")} == {""}


def test_calls_have_defaults() -> None:
    call = Infer({})
    assert (call.outputs, call.parameters, call.raw, call.positional, call.config, call.content_types) == (
        (),
        NONE,
        None,
        None,
        NONE,
        NONE,
    )
    assert field_values(Request(call)) == {
        "call": call,
        "model": "",
        "version": "",
        "id": "",
        "deadline_s": None,
        "metadata": {},
        "models": None,
        "caller": ANYONE,
        "is_trial": False,
        "times": CallTimes(),
    }
    assert field_values(Response(1)) == {"answer": 1, "model": "", "version": "", "limits": None}
    assert field_values(Inference({})) == {"outputs": {}, "parameters": NONE, "metadata": {}, "is_last": False}
    gradient = Gradient(sens=X)
    assert (gradient.inputs, gradient.positional, gradient.output, gradient.config, gradient.input) == (
        {},
        None,
        0,
        NONE,
        0,
    )
    assert ApplyJacobian(vec=X).input == 0
    hessian = ApplyHessian(sens=X, vec=X)
    assert (hessian.input1, hessian.input2) == (0, 0)
    assert field_values(Handle(method="GET", path="/p")) == {
        "method": "GET",
        "path": "/p",
        "query": "",
        "content": b"",
        "content_type": "",
        "handler": "",
        "params": {},
    }
    assert field_values(Handled(b"x")) == {
        "content": b"x",
        "content_type": "application/json",
        "status": 200,
        "metadata": {},
        "is_chunk": False,
    }
    description = field_values(ModelDescription("m", (), "p", OPEN))
    assert {"calls": frozenset(), "details": {}, "protocols": {}, "path": ""}.items() <= description.items()
    assert (Index().ready, Load().url, ScaleModel().replicas) == (False, "", 1)


def test_control_tokens_are_not_in_the_repr() -> None:
    for call in (Index("secret"), Load("secret"), Unload("secret"), ScaleModel("secret")):
        assert "secret" not in repr(call)
        assert call.token == "secret"
    assert {call.token for call in (Index(), Load(), Unload(), ScaleModel())} == {""}


@pytest.mark.parametrize(
    "call",
    [
        Infer({"x": X}),
        Infer({"x": X}, ("y",), {"p": 1}, b"raw"),
        Infer({}, positional=(X,)),
        Infer({}, config={"c": 1}),
        Infer({}, content_types={"y": "str"}),
    ],
)
def test_calls_survive_pickling(call: Infer) -> None:
    unpickled = pickle.loads(pickle.dumps(call))
    assert (unpickled.outputs, unpickled.parameters, unpickled.raw, unpickled.config, unpickled.content_types) == (
        call.outputs,
        call.parameters,
        call.raw,
        call.config,
        call.content_types,
    )
    assert [t.data.tolist() for t in unpickled.inputs.values()] == [t.data.tolist() for t in call.inputs.values()]
    assert (unpickled.positional is None) == (call.positional is None)
    inference = pickle.loads(pickle.dumps(Inference({"y": X}, {"p": 1}, {"k": "v"})))
    assert (inference.parameters, inference.metadata) == ({"p": 1}, {"k": "v"})


def test_empty_parameters_are_an_immutable_singleton() -> None:
    assert pickle.loads(pickle.dumps(NONE)) is NONE
    assert hash(NONE) == 0
    changed: Any = NONE
    with pytest.raises(TypeError, match=r"^parameters are immutable$"):
        changed["a"] = 1


def test_defaults_of_a_model() -> None:
    model = Model(ModelSpec(name="m"))
    assert model.signature() == Signature(open_inputs=True, open_outputs=True)
    assert (model.details(), model.measurements(), model.merges, model.platform, model.placement) == (
        {},
        (),
        64,
        "python_function",
        "",
    )
    assert model.unavailable() == ""
    assert (model.batched, model.handlers, model.takes_request) == (False, (), False)
