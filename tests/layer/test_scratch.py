"""Scratch memory, and where what outlives a call of compiled code is allocated: `torch.cuda` is made up here."""

import contextvars
import gc
import threading
import weakref

import pytest
import torch

from moereg.dispatch import select_backend
from moereg.layer.factory import make_kernel
from moereg.layer.kernel import MoEKernel
from moereg.nn.module import MoELayer
from moereg.runtime import graph_pools, workspace
from moereg.runtime.graph_pools import in_compiled_code, outside_pools
from moereg.runtime.workspace import WorkspacePool
from moereg.spec.problem import MoEProblem
from moereg.testing.inputs import make_inputs, make_weights
from tests.layer.small_layers import CPU, Cuda

CUDA = torch.device("cuda:0")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    monkeypatch.setattr(workspace, "_allocate", lambda num_bytes, device: torch.empty(num_bytes, dtype=torch.uint8))
    return Cuda(monkeypatch)


def _thread() -> str:
    return threading.current_thread().name


def test_only_compiled_code_on_a_gpu_needs_another_thread(cuda: Cuda) -> None:
    here = _thread()
    assert outside_pools(_thread, CUDA) == here
    with in_compiled_code():
        assert outside_pools(_thread, CPU) == here
        with in_compiled_code():
            pass
        assert outside_pools(_thread, CUDA) != here
        cuda.is_capturing = True
        assert outside_pools(_thread, CUDA) == here  # A graph's own memory, which the capture keeps.
    cuda.is_capturing = False
    assert outside_pools(_thread, CUDA) == here


def test_the_other_thread_has_the_streams_modes_and_variables_of_the_caller(cuda: Cuda) -> None:
    variable = contextvars.ContextVar("variable", default=0)
    variable.set(5)

    def modes() -> tuple[bool, bool]:
        assert variable.get() == 5
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    with in_compiled_code():
        assert outside_pools(modes, CUDA) == (True, False)
        with torch.no_grad():
            assert outside_pools(modes, CUDA) == (False, False)
        with torch.inference_mode():
            assert outside_pools(modes, CUDA) == modes()
    assert [stream for _, stream in cuda.streams] == [cuda] * 3


def test_scratch_that_stays_is_taken_outside(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def allocate(num_bytes, device):
        threads.append(_thread())
        return torch.empty(num_bytes, dtype=torch.uint8)

    monkeypatch.setattr(workspace, "_allocate", allocate)
    pool = WorkspacePool()
    with in_compiled_code():
        for rows in (4, 4, 400):  # It grows once; what is there already is just taken.
            pool.take(((rows,),), torch.float32, CUDA)
        cuda.is_capturing = True
        pool.take(((4,),), torch.float32, CUDA)
    assert [name == _thread() for name in threads] == [False, False, True]


def test_what_a_kernel_is_made_of_is_taken_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer may make its kernel when compiled code first runs it."""
    asked = []

    def outside(function, device):
        made = function()
        asked.append(type(made).__name__)
        return made

    monkeypatch.setattr("moereg.layer.factory.outside_pools", outside)
    problem = MoEProblem(num_experts=4, hidden_size=32, intermediate_size=32, top_k=2, quant="int8_w8a16")
    kernel = make_kernel(problem, make_weights(problem, CPU), select_backend(problem, "cpu"))
    assert asked == ["NoneType", "MoEKernel"]  # The map of experts, of which there is none, and the rest.
    kernel.reload(make_weights(problem, CPU, seed=1), write_shared=True)
    call = make_inputs(problem, 3, "uniform", CPU)
    assert kernel(call.hidden_states, call.topk_weights, call.topk_ids).isfinite().all()


def _layer(monkeypatch: pytest.MonkeyPatch, seen: list[int]) -> MoELayer:
    """A layer, at whose calls the depth of ops of compiled code is noted."""
    problem = MoEProblem(num_experts=4, hidden_size=32, intermediate_size=32, top_k=2, dtype="float32")
    inner = MoEKernel.check_and_run

    def noting(self, *arguments, **named):
        seen.append(graph_pools._HERE.num_ops)
        inner(self, *arguments, **named)

    monkeypatch.setattr(MoEKernel, "check_and_run", noting)
    return MoELayer(problem, make_weights(problem, CPU))


@pytest.mark.parametrize("way", ["called", "compiled", "exported"])
def test_ops_of_compiled_code_say_that_they_are(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    layer = _layer(monkeypatch, seen)
    call = make_inputs(layer.problem, 3, "uniform", CPU)
    arguments = (call.hidden_states, call.topk_weights, call.topk_ids)
    torch._dynamo.reset()
    ways = {
        "called": lambda: layer,
        "compiled": lambda: torch.compile(layer, fullgraph=True, backend="eager"),
        "exported": lambda: torch.export.export(layer, arguments).module(),
    }
    with torch.no_grad():
        ways[way]()(*arguments)
    assert seen == [0 if way == "called" else 1]
    assert graph_pools._HERE.num_ops == 0


def test_the_op_of_live_experts_says_so_too(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = pytest.importorskip("moereg.integrations._experts.calls", reason="the extra `transformers`")
    depths: list[int] = []

    class Served:
        def run(self, hidden_states, topk_ids, topk_weights, tensors):
            depths.append(graph_pools._HERE.num_ops)
            return hidden_states

    monkeypatch.setattr(calls, "layer_of", lambda handle: Served())
    calls._live_experts(torch.zeros(1, 4), torch.zeros(1, 1), torch.zeros(1, 1), [], torch.tensor(1))
    assert depths == [1]


def test_an_error_there_keeps_nothing_alive(cuda: Cuda) -> None:
    def fails() -> None:
        large = torch.empty(8)
        held.append(weakref.ref(large))
        raise MemoryError("of that thread")

    held: list[weakref.ref[torch.Tensor]] = []
    gc.disable()
    try:
        with in_compiled_code(), pytest.raises(MemoryError, match="of that thread"):
            outside_pools(fails, CUDA)
        assert held[0]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tensors_are_aligned_and_apart(dtype: torch.dtype) -> None:
    shapes = ((3, 5), (0,), (7,), (2, 129))
    tensors = WorkspacePool().take(shapes, dtype, CPU)
    assert [tuple(tensor.shape) for tensor in tensors] == list(shapes)
    assert {tensor.dtype for tensor in tensors} == {dtype}
    for place, tensor in enumerate(tensors):
        assert tensor.is_contiguous()
        assert tensor.numel() == 0 or tensor.data_ptr() % 256 == 0
        tensor.fill_(place)
    for place, tensor in enumerate(tensors):
        assert (tensor == place).all()


def test_one_buffer_grows_to_the_largest_need() -> None:
    pool = WorkspacePool()
    assert [tensor.numel() for tensor in pool.take(((0,), (0, 4)), torch.bfloat16, CPU)] == [0, 0]
    assert pool.num_bytes == 0
    (small,) = pool.take(((16,),), torch.float32, CPU)
    assert pool.num_bytes == 256
    (large,) = pool.take(((1000,),), torch.float32, CPU)
    assert pool.num_bytes == 4096
    (again,) = pool.take(((16,),), torch.bfloat16, CPU)
    assert again.data_ptr() == large.data_ptr() != small.data_ptr()
    assert (large.dtype, again.dtype) == (torch.float32, torch.bfloat16)
    assert pool.num_bytes == 4096
    pool.release()
    assert pool.num_bytes == 0
    pool.take(((16,),), torch.float32, CPU)
    assert pool.num_bytes == 256


def test_devices_have_buffers_of_their_own() -> None:
    """Covers devices other than CUDA ones, such as another vendor's."""
    pool = WorkspacePool()
    devices = [CPU, torch.device("meta"), CPU]
    assert [pool.take(((64,),), torch.float32, device)[0].device for device in devices] == devices
    assert pool.num_bytes == 2 * 256


def test_what_inference_mode_took_is_written_outside_it() -> None:
    pool = WorkspacePool()
    with torch.inference_mode():
        pool.take(((64,),), torch.float32, CPU)
    (tensor,) = pool.take(((64,),), torch.float32, CPU)
    assert tensor.zero_().sum() == 0


def test_streams_do_not_share(cuda: Cuda) -> None:
    pool = WorkspacePool()
    found = []
    for device, stream in (("cuda:0", 7), ("cuda:0", 8), ("cuda:1", 7), ("cuda:0", 7)):
        cuda.cuda_stream = stream
        found.append(pool.take(((64,),), torch.float32, torch.device(device))[0].data_ptr())
    assert found[0] == found[3]
    assert len(set(found)) == 3


def test_a_captured_graph_has_scratch_of_its_own(cuda: Cuda) -> None:
    """Replays write to it at any time, also after the shared buffer has grown and its memory serves others."""
    pool = WorkspacePool()
    device = torch.device("cuda:0")
    (eager,) = pool.take(((64,),), torch.float32, device)
    cuda.is_capturing = True
    captured = [pool.take(((64,),), torch.float32, device)[0] for _ in range(2)]
    assert len({tensor.data_ptr() for tensor in (eager, *captured)}) == 3
    assert pool.num_bytes == 256
    cuda.is_capturing = False
    assert pool.take(((64,),), torch.float32, device)[0].data_ptr() == eager.data_ptr()


def test_threads_do_not_share() -> None:
    pool = WorkspacePool()
    barrier = threading.Barrier(4)
    pointers: list[int] = []

    def take() -> None:
        (tensor,) = pool.take(((64,),), torch.float32, CPU)
        pointers.append(tensor.data_ptr())
        barrier.wait(timeout=30)

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(pointers)) == 4
