"""Every public name of torch's Optimizer and Module, on what strata.wrap() returns: it works as in
plain PyTorch, or raises by name. A name that a new version of torch adds is in no table, and fails.
"""

import copy
import pickle
from collections.abc import Callable
from inspect import isfunction
from typing import Any

import pytest
import strata
import torch
from torch import nn
from torch.optim import Optimizer

Try = Callable[[Any, Any], Any]


def make(wraps: bool) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if wraps:
        memory = {"device": "1MiB", "host": "4MiB"}
        model, optimizer = strata.wrap(model, optimizer, memory=memory, activations=None)
    step(model, optimizer)
    return model, optimizer


def step(model: Any, optimizer: Any) -> None:
    (model(torch.linspace(-1, 1, 12).reshape(3, 4)) - 1).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def called(register: Callable[[Any], Any], then: Callable[[], Any]) -> int:
    """How often a hook was called."""
    calls: list[Any] = []
    handle = register(lambda *_, **__: calls.append(1))
    then()
    handle.remove()
    then()
    return len(calls)


def forwards(m: Any) -> Any:
    return lambda: m(torch.ones(3, 4)).sum().backward()


def zero_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.weight)


def emptied(module: Any) -> None:
    """Values are whatever they are, and begin anew."""
    module.to_empty(device="cpu")
    nn.init.ones_(module.weight)
    nn.init.zeros_(module.bias)


def doubled(m: Any) -> dict[str, Any]:
    return {name: value.clone() * 2 for name, value in m.state_dict().items()}


def assigns(m: Any) -> Any:
    return m.load_state_dict(doubled(m), assign=True)


def scaled_groups(o: Any) -> list[float]:
    o.param_groups = [{**group, "lr": 0.5} for group in o.param_groups]
    return [group["lr"] for group in o.param_groups]


def all_names(m: Any) -> list[int]:
    kinds = ("parameters", "buffers", "children", "modules")
    return [len(list(getattr(m, f"{n}{kind}")())) for kind in kinds for n in ("", "named_")]


OPTIMIZER: dict[str, Try] = {
    "defaults": lambda m, o: o.defaults["lr"],
    "state": lambda m, o: [o.state[p]["momentum_buffer"].clone() for p in m.parameters()],
    "param_groups": lambda m, o: scaled_groups(o),
    "step": lambda m, o: (forwards(m)(), o.step(lambda: 3), o.zero_grad())[1],
    "zero_grad": lambda m, o: (forwards(m)(), o.zero_grad(), m[0].weight.grad)[2],
    "state_dict": lambda m, o: copy.deepcopy(o.state_dict()["state"][0]["momentum_buffer"]),
    "load_state_dict": lambda m, o: o.load_state_dict(copy.deepcopy(o.state_dict())),
    "profile_hook_step": lambda m, o: Optimizer.profile_hook_step(lambda self: 3)(o),
    "register_step_pre_hook": lambda m, o: called(o.register_step_pre_hook, lambda: step(m, o)),
    "register_step_post_hook": lambda m, o: called(o.register_step_post_hook, lambda: step(m, o)),
    "register_state_dict_pre_hook": lambda m, o: called(
        o.register_state_dict_pre_hook, o.state_dict
    ),
    "register_state_dict_post_hook": lambda m, o: called(
        o.register_state_dict_post_hook, o.state_dict
    ),
    "register_load_state_dict_pre_hook": lambda m, o: called(
        o.register_load_state_dict_pre_hook, lambda: o.load_state_dict(o.state_dict())
    ),
    "register_load_state_dict_post_hook": lambda m, o: called(
        o.register_load_state_dict_post_hook, lambda: o.load_state_dict(o.state_dict())
    ),
    "__repr__": lambda m, o: repr(o).partition("(")[2],
    "__getstate__": lambda m, o: " ".join(sorted(o.__getstate__())),
}
OPTIMIZER_RAISES: dict[str, tuple[Try, str]] = {
    "add_param_group": (
        lambda m, o: o.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
        r"strata\.unwrap\(model\)",
    ),
    "__setstate__": (lambda m, o: o.__setstate__(o.__getstate__()), "load_state_dict"),
    "copy": (lambda m, o: copy.copy(o), "strata"),
    "deepcopy": (lambda m, o: copy.deepcopy(o), "strata"),
    "pickle": (lambda m, o: pickle.dumps(o), "strata"),
}
# Types alone, or nothing of an object's.
OPTIMIZER_APART = {"OptimizerPostHook", "OptimizerPreHook"}

MODULE: dict[str, Try] = {
    **{
        name: lambda m, o: all_names(m)
        for kind in ("parameters", "buffers", "children", "modules")
        for name in (kind, f"named_{kind}")
    },
    "add_module": lambda m, o: m.add_module("relu", nn.ReLU()),
    "register_module": lambda m, o: m.register_module("relu", nn.ReLU()),
    "set_submodule": lambda m, o: m.set_submodule("2", nn.Identity()),
    "register_buffer": lambda m, o: m.register_buffer("more", torch.ones(2)),
    "register_parameter": lambda m, o: m.register_parameter("more", nn.Parameter(torch.ones(2))),
    "apply": lambda m, o: m.apply(zero_weights) is m,
    "train": lambda m, o: m.train(False).training,
    "eval": lambda m, o: m.eval().training,
    "extra_repr": lambda m, o: m[0].extra_repr(),
    "__repr__": lambda m, o: repr(m),
    "forward": lambda m, o: m.eval().forward(torch.ones(3, 4)).detach().clone(),
    "compile": lambda m, o: m.compile(backend="eager"),
    "get_submodule": lambda m, o: m.get_submodule("0") is m[0],
    "get_parameter": lambda m, o: m.get_parameter("0.weight").detach().clone(),
    "get_buffer": lambda m, o: m.get_buffer("1.running_mean").clone(),
    "state_dict": lambda m, o: {n: v.clone() for n, v in m.state_dict().items()},
    "load_state_dict": lambda m, o: str(m.load_state_dict(doubled(m))),
    "requires_grad_": lambda m, o: m[0].requires_grad_(False).weight.requires_grad,
    "zero_grad": lambda m, o: (forwards(m)(), m.zero_grad(), m[0].weight.grad)[2],
    "to": lambda m, o: m.to("cpu") is m,
    "cpu": lambda m, o: m.cpu() is m,
    "float": lambda m, o: m.float() is m,
    "type": lambda m, o: m.type(torch.float32) is m,
    "to_empty": lambda m, o: emptied(m[2]),
    "register_forward_hook": lambda m, o: called(m.register_forward_hook, forwards(m)),
    "register_forward_pre_hook": lambda m, o: called(m.register_forward_pre_hook, forwards(m)),
    "register_full_backward_hook": lambda m, o: called(
        m[2].register_full_backward_hook, forwards(m)
    ),
    "register_full_backward_pre_hook": lambda m, o: called(
        m[2].register_full_backward_pre_hook, forwards(m)
    ),
    "register_backward_hook": lambda m, o: called(m[2].register_backward_hook, forwards(m)),
    "register_state_dict_pre_hook": lambda m, o: called(
        m.register_state_dict_pre_hook, m.state_dict
    ),
    "register_state_dict_post_hook": lambda m, o: called(
        m.register_state_dict_post_hook, m.state_dict
    ),
    "register_load_state_dict_pre_hook": lambda m, o: called(
        m.register_load_state_dict_pre_hook, lambda: m.load_state_dict(m.state_dict())
    ),
    "register_load_state_dict_post_hook": lambda m, o: called(
        m.register_load_state_dict_post_hook, lambda: m.load_state_dict(m.state_dict())
    ),
    "deepcopy": lambda m, o: {n: v.clone() for n, v in copy.deepcopy(m).state_dict().items()},
    "pickle": lambda m, o: type(pickle.loads(pickle.dumps(m))[0].weight) is nn.Parameter,
    "copy": lambda m, o: copy.copy(m)[0].weight is m[0].weight,
    "__setstate__": lambda m, o: m.__setstate__(m.__dict__.copy()),
}
BECOMES = r"cannot become .* after strata\.wrap\(\)"
MODULE_RAISES: dict[str, tuple[Try, str]] = {
    "half": (lambda m, o: m.half(), BECOMES),
    "double": (lambda m, o: m.double(), BECOMES),
    "bfloat16": (lambda m, o: m.bfloat16(), BECOMES),
    "to another": (lambda m, o: m.to(torch.float64), BECOMES),
    "type another": (lambda m, o: m.type(torch.float64), BECOMES),
    "share_memory": (lambda m, o: m.share_memory(), "strata"),
    "load_state_dict(assign=True)": (lambda m, o: assigns(m), r"strata\.wrap\(\)"),
}
# Types and settings of the class, what modules themselves define, and other devices, of which these
# tests have none: they end where .to() does.
MODULE_APART = {
    *("T_destination", "call_super_init", "dump_patches", "get_extra_state", "set_extra_state"),
    *("cuda", "ipu", "mtia", "xpu"),
}


def names_of(kind: type) -> set[str]:
    """Of torch's own: libraries put functions there, too."""
    public = {name: getattr(kind, name) for name in dir(kind) if not name.startswith("_")}
    foreign = {n for n, f in public.items() if isfunction(f) and not is_of_torch(f)}
    return public.keys() - foreign


def is_of_torch(function: Callable[..., Any]) -> bool:
    return function.__module__.split(".")[0] == "torch"


def test_the_tables_have_all_names() -> None:
    tables: list[tuple[type, Any, Any, set[str]]] = [
        (Optimizer, OPTIMIZER, OPTIMIZER_RAISES, OPTIMIZER_APART),
        (nn.Module, MODULE, MODULE_RAISES, MODULE_APART),
    ]
    for kind, works, raises, apart in tables:
        missing = names_of(kind) - works.keys() - raises.keys() - apart
        assert not missing, f"what do they do on a wrapped {kind.__name__}?"


def end(pair: tuple[Any, Any]) -> list[torch.Tensor]:
    return [p.detach().clone() for p in pair[0].parameters()]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*OPTIMIZER, *(f"Module.{name}" for name in MODULE)])
def test_it_works_as_in_plain_pytorch(name: str) -> None:
    attempt = MODULE[name[7:]] if name.startswith("Module.") else OPTIMIZER[name]
    plain, ours = make(False), make(True)
    expected, found = attempt(*plain), attempt(*ours)
    if isinstance(expected, torch.Tensor | dict | list):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    else:
        assert found == expected
    for pair in (plain, ours):
        pair[0].train()
        step(*pair)
    for one, other in zip(end(plain), end(ours), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", [*OPTIMIZER_RAISES, *(f"Module.{name}" for name in MODULE_RAISES)])
def test_it_raises_by_name_and_changes_nothing(name: str) -> None:
    table = MODULE_RAISES if name.startswith("Module.") else OPTIMIZER_RAISES
    attempt, message = table[name.removeprefix("Module.")]
    pair = make(True)
    before = end(pair)
    with pytest.raises((RuntimeError, TypeError), match=message):
        attempt(*pair)
    assert all(torch.equal(a, b) for a, b in zip(end(pair), before, strict=True))
    step(*pair)
