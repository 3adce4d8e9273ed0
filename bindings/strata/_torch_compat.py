"""Every private name of torch that strata uses, and a class of torchao that need not be there.

torch 2.8 is the oldest that has all of them: 2.7 cannot say which saved-tensor hooks lie on top of
its stack. A torch that lacks one is refused, by name, when this is imported.

    from ._torch_compat import graph_task
    in_backward = graph_task() != -1

Attributes of torch's objects that are private too (tensor._version, module._buffers) have kept
their names since torch 1; they are used where they are needed.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode

OLDEST = "2.8"


def _private(path: str) -> Any:
    """What torch calls so. ImportError where this version has no such name."""
    found: Any = torch
    for name in path.split("."):
        found = getattr(found, name, None)
        if found is None:
            raise ImportError(
                f"strata needs PyTorch {OLDEST} or newer: {torch.__version__} has no torch.{path}"
            )
    return found


# The stack of saved-tensor hooks. It comes first: it is what old versions lack.
push_hooks: Callable[[Any, Any], None] = _private("_C._autograd._push_saved_tensors_default_hooks")
pop_hooks: Callable[[], None] = _private("_C._autograd._pop_saved_tensors_default_hooks")
top_hooks: Callable[[bool], Any] = _private("_C._autograd._top_saved_tensors_default_hooks")

# Where processes of torch.distributed find each other: it outlives their groups for who has it.
default_store: Callable[[], Any] = _private("distributed.distributed_c10d._get_default_store")

# Backward: the task that runs on this thread (-1: none), its node, and whether it will run another.
graph_task: Callable[[], int] = _private("_C._current_graph_task_id")
current_node: Callable[[], Any] = _private("_C._current_autograd_node")
will_run: Callable[[Any], bool] = _private("_C._will_engine_execute_node")
preserve_version: Callable[[torch.Tensor], Any] = _private(
    "autograd._unsafe_preserve_version_counter"
)

# Tensors and storages: who uses them, and how they are viewed and copied.
tensors_over: Callable[[int], int] = _private("_C._storage_Use_Count")
use_count: Callable[[torch.Tensor], int] = _private("Tensor._use_count")
storage_of_weak: Callable[[int], Any] = _private("UntypedStorage._new_with_weak_ptr")
shares_memory: Callable[[torch.Tensor], bool] = _private("_C._is_cow_tensor")
lazy_clone: Callable[[torch.Tensor], torch.Tensor] = _private("_lazy_clone")
neg_view: Callable[[torch.Tensor], torch.Tensor] = _private("_neg_view")
conj_view: Callable[[torch.Tensor], torch.Tensor] = _private("_conj")
assert_async: Callable[[torch.Tensor, str], None] = _private("_assert_async")

# torch.func: what puts tensors in the place of parameters, tensors under a transformation and what
# they stand for. Its gradients forbid the hooks above.
functional_call: Any = _private("nn.utils.stateless._functional_call")
is_transformed: Callable[[Any], bool] = _private("_C._functorch.is_functorch_wrapped_tensor")
transformed: Callable[[torch.Tensor], torch.Tensor] = _private("_C._functorch.get_unwrapped")
hooks_allowed: Callable[[], bool] = _private("_C._autograd._saved_tensors_hooks_is_enabled")

# Operations on lists of tensors, and tensors without memory.
foreach_norm: Callable[..., Any] = _private("_foreach_norm")
foreach_mul: Callable[..., Any] = _private("_foreach_mul_")
foreach_div: Callable[..., Any] = _private("_foreach_div_")
foreach_zero: Callable[..., Any] = _private("_foreach_zero_")
check_and_unscale: Callable[..., Any] = _private("_amp_foreach_non_finite_check_and_unscale_")
make_wrapper: Callable[..., Any] = _private("Tensor._make_wrapper_subclass")

# Operations with their schemas, and all overloads of one.
OpOverload: Any = _private("_ops.OpOverload")
OpOverloadPacket: Any = _private("_ops.OpOverloadPacket")

# Whether a tensor can take another's data: nn.Module.to() and the like ask.
compatible: Callable[..., bool] = _private("_has_compatible_shallow_copy_type")

# The storage that the deprecated Tensor.storage() returns.
typed_storage: Callable[..., Any] = _private("Tensor._typed_storage")

# What plain tensors and parameters pickle as.
rebuild_tensor: Callable[..., Any] = _private("_utils._rebuild_tensor_v2")
rebuild_parameter: Callable[..., Any] = _private("_utils._rebuild_parameter")

# What Tensor.to() was asked for: device, dtype, whether to wait, memory format.
parse_to: Callable[..., tuple[Any, ...]] = _private("_C._nn._parse_to")

# What torch's functions do for a block of code: nothing of subclasses; nothing of torch.compile,
# neither in it nor in what it calls, or just not in it.
DisableTorchFunction: Any = _private("_C.DisableTorchFunctionSubclass")
untraced: Any = _private("_compile._disable_dynamo")
untraced_itself: Any = functools.partial(untraced, recursive=False)

# What compiles the functions that this thread calls (None: nothing), and changing it, which
# returns what did so before.
compiler: Callable[[], Any] = _private("_C._dynamo.eval_frame.get_eval_frame_callback")
set_compiler: Callable[[Any], Any] = _private("_C._dynamo.eval_frame.set_eval_frame")

# The profiler without Kineto.
PROFILER_LEGACY: Any = _private("_C._profiler.ActiveProfilerType.LEGACY")
ProfilerDetails: Any = _private("_C._profiler._ExperimentalConfig")
ProfilerEnd: Any = _private("_C._autograd._ProfilerDisableOptions")
profiler_type: Callable[[], Any] = _private("_C._autograd._profiler_type")
profiler_enabled: Callable[[], bool] = _private("_C._autograd._profiler_enabled")
enable_profiler: Callable[[Any], None] = _private("autograd._enable_profiler_legacy")
disable_profiler: Callable[..., Any] = _private("autograd._disable_profiler_legacy")
LIBRARY: str = _private("_C.__file__")  # torch's own, as a file
# Functions of ATen/record_function.h in it: whether this thread has callbacks that see each
# operation, and an end of them. A PyTorch that is built otherwise may lack them.
HAS_CALLBACKS = "_ZN2at23hasThreadLocalCallbacksEv"
CLEAR_CALLBACKS = "_ZN2at25clearThreadLocalCallbacksEv"

# The module that torch.compile loads for CUDA graphs; there where it was used.
GRAPHS_MODULE = "torch._inductor.cudagraph_trees"
# The logger of what cannot run on shapes alone.
SHAPES_LOGGER = "torch._subclasses.fake_tensor"

BatchNorm = _BatchNorm

# Hooks on all modules: torch keeps them in these dictionaries for good.
GLOBAL_HOOKS: tuple[dict[int, Any], ...] = tuple(
    _private(f"nn.modules.module._global_{kind}_hooks")
    for kind in ("forward_pre", "forward", "backward_pre", "backward")
)


def captures_graphs(found: Any) -> bool:
    """Whether what compiler() found makes CUDA graphs. Wrappers of it name what they wrap so."""
    while found is not None:
        config = getattr(found, "config", None)
        if isinstance(config, dict) and config.get("triton.cudagraphs"):
            return True
        if getattr(found, "compiler_name", "") == "cudagraphs":
            return True
        names = ("_torchdynamo_orig_backend", "_torchdynamo_orig_callable")
        found = next((getattr(found, n) for n in names if hasattr(found, n)), None)
    return False


def one_graph_each() -> Any:
    """A context in which torch.compile makes a graph for just the shapes and numbers that it sees:
    no other matches them later."""
    return torch._dynamo.config.patch(
        assume_static_by_default=True, automatic_dynamic_shapes=False, specialize_float=True
    )


def is_stopped_script(error: Exception) -> bool:
    """Whether TorchScript has turned the exception by which checkpoint ends a second run early, one
    without a word, into one of its own."""
    text = str(error)
    return "in the TorchScript interpreter" in text and text.rstrip().endswith("RuntimeError:")


def held_by_torch(tensor: torch.Tensor) -> bool:
    """Whether torch itself holds a tensor of torch's own class, whoever holds it in Python.

    Of a tensor that nobody in Python holds, old versions (2.8) do not count Python's use, also when
    the garbage collector hands it out. torch hands it out again, and counts both.
    """
    with DisableTorchFunction():
        return use_count(tensor.to(tensor.dtype)) > 1


def awaited(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that a collective of torch.distributed may not have filled yet, when it has."""
    wait = getattr(tensor, "trigger_wait", None)
    return tensor if wait is None else wait()


def copy_rows(target: torch.Tensor, value: torch.Tensor) -> None:
    """As target.copy_(value), which torch refuses an expanded tensor, of which all rows are one."""
    for dim, stride in enumerate(target.stride()):
        if stride == 0:
            target, value = target.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    with torch.no_grad():
        target.copy_(value)


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor. torch.distributed.tensor takes long to import, and is not."""
    return type(tensor).__name__ == "DTensor"


def is_nf4(parameter: torch.Tensor) -> bool:
    """Whether it is torchao's NF4Tensor, which need not be installed."""
    kind = type(parameter)
    return kind.__name__ == "NF4Tensor" and kind.__module__.startswith("torchao.")


__all__ = ["BatchNorm", "FakeTensor", "FakeTensorMode", "TorchDispatchMode"]
