"""The rules of the recorder: a program gives what the transforms give, or ends before the one that it cannot hold."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import random
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import monai.transforms as mt
import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from monai.data import MetaTensor

from monai_gds import limits
from monai_gds.programs import kept
from monai_gds.programs.ghostly import is_ghost
from monai_gds.programs.program import Program, View
from monai_gds.programs.recorder import Recorder
from monai_gds.programs.replay import GuardFailed, _copied, answered, replay
from tests.programs.recordings import (
    AS_CUDA,
    BOTH,
    CPU,
    CUDA,
    SHAPE,
    Outcome,
    Voxels,
    Where,
    item,
    record,
    run,
    seeded,
    steps_of,
    tensors,
)

WHERE = [
    pytest.param(CPU, id="cpu"),
    pytest.param(AS_CUDA, id="cuda on the cpu"),
    pytest.param(CUDA, id="cuda", marks=pytest.mark.gpu),
]


class Own(mt.RandomizableTransform, mt.MapTransform):  # type: ignore[misc]
    """A user's own transform: a function of itself and the image, or of itself and the item."""

    def __init__(self, function: Callable[[Any, Any], Any], whole: bool = False) -> None:
        mt.RandomizableTransform.__init__(self, 1.0)
        mt.MapTransform.__init__(self, "image")
        self.function, self.whole = function, whole
        self.kept: Any = None
        self.history: list[Any] = []

    def __call__(self, data: Any) -> Any:
        out = dict(data)
        if self.whole:
            return self.function(self, out)
        out["image"] = self.function(self, out["image"])
        return out


def own(function: Callable[[Any, Any], Any], whole: bool = False) -> Callable[[], Any]:
    """A crop, a flip, somebody's own transform, and another flip."""
    return lambda: mt.Compose(
        [
            mt.RandSpatialCropSamplesd(BOTH, (18, 17, 16), 1),
            mt.RandFlipd(BOTH, 1.0, 0),
            Own(function, whole),
            mt.RandFlipd(BOTH, 0.5, 1),
        ]
    )


def ran(function: Callable[[Any, Any], Any], where: Where = CPU, whole: bool = False, seeds: int = 1) -> Outcome:
    """The last outcome of some seeds, after comparing all of them."""
    for seed in range(seeds):
        outcome = run(own(function, whole), where, seed)
    return outcome


def voxels(program: Program, of: dict[str, Any]) -> dict[str, Voxels]:
    """What a program reads of an item."""
    return {name: Voxels(of[name].as_tensor(), boxes) for name, boxes in program.boxes().items()}


# Transforms that are recorded


def torch_only(self: Own, x: Any) -> Any:
    x = torch.where(x > 4, x * self.R.uniform(0.5, 1.5), x).roll(int(self.R.randint(1, 5)), dims=-1)
    weights = torch.softmax(torch.linspace(-1, 1, 5, device=x.device), 0)
    smooth = F.conv1d(x.flatten(0, -2).unsqueeze(1), weights.view(1, 1, 5), padding=2)
    return smooth.view(x.shape).clamp_(0, 1)


def in_place(self: Own, x: Any) -> Any:
    at = int(self.R.randint(0, 9))
    x[:, at : at + 4] = 0
    x.add_(1)
    x[0, 0].mul_(2)
    x[0, 1] *= 3
    return x


def numbers(self: Own, x: Any) -> Any:
    shape = torch.tensor(x.shape[1:], device=x.device)
    where = [float(n) for n in shape] + shape.tolist() + [int(shape.cpu().numpy()[0])]
    return x + sum(where)


def by_list(self: Own, x: Any) -> Any:
    return x[:, [2, 1, 0]][:, :, np.array([4, 3])] + x[..., torch.tensor([1, 0])].sum()


def of_numbers(self: Own, x: Any) -> Any:
    one = torch.ones((), device=x.device)
    return x * torch.as_tensor((one, 2.0, 3.0), device=x.device).sum() + x.new_tensor([1.0, 2.0]).sum()


def on_its_device(self: Own, x: Any) -> Any:
    assert x.device == torch.zeros(1, device=x.device).device
    assert not x.is_meta and x.is_cuda != x.is_cpu and (x.get_device() >= 0) == x.is_cuda
    assert x.data_ptr() == x[:].data_ptr() != x.clone().data_ptr()
    assert ("cuda" in x.type()) == x.is_cuda
    return x * 2 if x.device.type == "cpu" else x * 2.0


def there_and_back(self: Own, x: Any) -> Any:
    return x.cpu().mul(2).to(x.device) + torch.arange(3.0).to(x)[0] + x.to(torch.float64).float()


def copied(self: Own, x: Any) -> Any:
    twin = copy.deepcopy(x)
    twin += 1
    return x + twin


class Net(torch.nn.Module):
    """A module whose parameter others hold, too."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor([0.3, 0.7]), requires_grad=False)
        self.held = [self.scale]


def module(self: Own, x: Any) -> Any:
    net = Net().to(x.device)
    assert net.held[0].device == x.device
    return x * torch.exp(net.held[0]).sum()


class Big(torch.nn.Module):
    """A module of a transform's own, with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Conv3d(1, 2, 3, padding=1)
        self.register_buffer("scale", torch.tensor([0.3]))

    def forward(self, x: Any) -> Any:
        return self.layer(x) * self.scale


def network(self: Own, x: Any) -> Any:
    if self.kept is None:
        self.kept = Big()
    layer = self.kept.layer
    with torch.inference_mode():
        out = self.kept.to(x.device)(x.as_tensor()[None])[0]
    assert layer.weight.device == x.device
    return out.clone()


def asking(self: Own, x: Any) -> Any:
    there = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if x.is_cuda:
        assert there.type == "cuda" and torch.cuda.current_device() == x.get_device() == x.device.index
    return x * 2


def constants(self: Own, x: Any) -> Any:
    one, two = (torch.ones(3).to(x.device, copy=True) for _ in range(2))
    expanded = torch.ones(1).expand(4).to(x.device, copy=True)
    one.add_(torch.arange(3, device=x.device))
    expanded[1] = 5
    return x + one.sum() + two.sum() + expanded.sum()


def reshaped(self: Own, x: Any) -> Any:
    out = F.interpolate(x[None].to(memory_format=torch.channels_last_3d), scale_factor=2.0)
    out = F.conv3d(out, torch.ones(3, 1, 1, 1, 1, device=x.device).contiguous(memory_format=torch.channels_last_3d))
    return x * out.reshape(3, -1).view(3, 2, -1).transpose(0, 1).reshape(6, -1)[:, ::3].mean()


def gradient(self: Own, x: Any) -> Any:
    leaf = x.as_tensor().clone().requires_grad_()
    (leaf.pow(3).sum() + leaf[0, 0].sin().sum()).backward()
    return x + leaf.grad


def dtypes(self: Own, x: Any) -> Any:
    plain = x.as_tensor()
    turned = torch.fft.fftn(plain).conj()
    turned = turned * torch.exp(1j * torch.tensor(0.3, dtype=torch.float64))
    back = torch.fft.ifftn(turned.conj()).real + turned.imag * 0
    small = plain.half().float() + plain.bfloat16().float() + (plain > 3) + plain.long() + plain[:0].sum()
    return x + back + small


def several(self: Own, data: Any) -> Any:
    image = data["image"]
    low, high = image.chunk(2, dim=-1)
    data.update(low=low, again=image, empty=image[:, :0], zero=image.sum(), array=np.arange(3), number=np.float32(2))
    eye = torch.eye(3)
    data.update(
        eye=eye,
        row=eye[1],
        column=eye[:, 2],
        mask=image > 3,
        half=image.half(),
        pair=(image, [low, high]),
        kind=image.dtype,
    )
    return data


def nested(self: Own, x: Any) -> Any:
    return mt.Compose([mt.SpatialPad((30, 30, 30)), mt.CenterSpatialCrop((12, 12, 12)), mt.Resize((7, 8, 9))])(x)


def own_generator(self: Own, x: Any) -> Any:
    if self.kept is None:
        self.kept = np.random.default_rng(3), torch.Generator().manual_seed(4)
    return x + float(self.kept[0].uniform()) + torch.rand(2, generator=self.kept[1]).sum().to(x.device)


def globally_drawn(self: Own, x: Any) -> Any:
    return x + float(np.random.uniform()) + float(torch.rand(1))


def large_grid(self: Own, x: Any) -> Any:
    """Made of nothing on the CPU, and too large for a constant."""
    large = F.pad(x, (10,) * 6)
    axes = [torch.linspace(-1, 1, n) for n in large.shape[1:]]
    grid = torch.stack(torch.meshgrid(*axes, indexing="ij")).mul_(0.5)
    grid[0, 0] = 2
    assert grid.device.type == "cpu"
    return large + grid.prod(0).to(x.device)


def numbers_on_both(self: Own, x: Any) -> Any:
    """Has torch make tensors of numbers, for functions that are given others on both devices."""
    axes = [torch.linspace(-1, 1, n) for n in SHAPE]
    grid = torch.stack(torch.meshgrid(*axes, indexing="ij")).prod(0)
    assert grid.device.type == "cpu"
    x = x.clone()
    x[0, grid[: x.shape[1], : x.shape[2], : x.shape[3]] > 0] = 0.5
    return torch.where(condition=x > 1, input=x, other=0.25)


RECORDED = [
    torch_only, in_place, numbers, by_list, of_numbers, on_its_device, there_and_back, copied, module, gradient,
    network, asking, constants, reshaped, dtypes, nested, own_generator, globally_drawn, large_grid,
    numbers_on_both,
]  # fmt: skip


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("function", RECORDED)
def test_ones_own(function: Callable[[Any, Any], Any], where: Where) -> None:
    outcome = ran(function, where)
    assert outcome.done is None, outcome.why
    assert len(steps_of(outcome.program)) > 1


@pytest.mark.parametrize("where", WHERE)
def test_a_crop_that_is_written_to_leaves_the_volume_alone(where: Where) -> None:
    written = run(lambda: mt.Compose([mt.RandSpatialCropSamplesd(BOTH, (9, 9, 9), 2), Own(in_place)]), where)
    assert written.done is None
    assert written.program.copied == {"image"}
    refused = run(lambda: mt.Compose([mt.RandSpatialCropd(BOTH, (9, 9, 9)), Own(to_numpy)]), where)
    assert refused.done == 1 and refused.program.copied == {"image", "label"}


@pytest.mark.parametrize("where", WHERE)
def test_several_results(where: Where) -> None:
    outcome = run(lambda: Own(several, whole=True), where)
    assert outcome.done is None, outcome.why


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8, torch.float16, torch.bfloat16, torch.float64, torch.bool])
def test_volumes_of_other_dtypes(dtype: torch.dtype) -> None:
    outcome = run(own(lambda self, x: torch.cat([x, x.flip(1)]).to(torch.float32) * 2), of=item(dtype=dtype))
    assert outcome.done is None


def test_a_conjugate_of_a_complex_volume() -> None:
    turned = run(
        lambda: mt.Compose([mt.RandSpatialCropd(BOTH, (9, 9, 9)), Own(lambda self, x: torch.resolve_conj(x.conj()))]),
        of=item(dtype=torch.complex64) | {"image": MetaTensor(torch.randn(1, *SHAPE, dtype=torch.complex64))},
    )
    assert turned.done is None, turned.why


def test_numbers_that_are_equal_and_of_other_types() -> None:
    def squares(self: Own, data: Any) -> Any:
        whole = data["image"].to(torch.int32)
        return {**data, "kinds": [(whole**2).dtype, (whole**2.0).dtype]}

    assert run(lambda: Own(squares, whole=True)).got["kinds"] == [torch.int32, torch.float32]


# Transforms that are refused


def hidden(self: Own, x: Any) -> Any:
    try:
        return x + float(x.max())
    except:  # noqa: E722
        return x


def suppressed(self: Own, x: Any) -> Any:
    with contextlib.suppress(BaseException):
        x = x + x.mean().item()
    return x


def error_hidden(self: Own, x: Any) -> Any:
    try:
        return x[x > 3].mean() + x
    except RuntimeError:
        return x


def to_numpy(self: Own, x: Any) -> Any:
    return torch.as_tensor(np.sqrt(x.cpu().numpy()), device=x.device)


def a_list(self: Own, x: Any) -> Any:
    return x * len(x.flatten()[:3].tolist()) if x.flatten()[:3].tolist()[0] > 2 else x


def drawn_there(self: Own, x: Any) -> Any:
    return x + torch.rand_like(x)


def drawn_in_place(self: Own, x: Any) -> Any:
    return x + torch.zeros(3, device=x.device).expand(2, 3).sum() + x.clone().normal_()


def kept_in_a_list(self: Own, x: Any) -> Any:
    self.kept = [x]
    return x + 1


def pickled(self: Own, x: Any) -> Any:
    return copy.copy(x) + 1


def other_thread(self: Own, x: Any) -> Any:
    made = []
    thread = threading.Thread(target=lambda: made.append(x * 2))
    thread.start()
    thread.join()
    return made[0]


def thread_in_place(self: Own, x: Any) -> Any:
    x = x.clone()
    thread = threading.Thread(target=lambda: x.mul_(2))
    thread.start()
    thread.join()
    return x


def autocast(self: Own, x: Any) -> Any:
    with torch.autocast(x.device.type, torch.bfloat16):
        return x + (x.as_tensor().flatten(1)[:, :16] @ torch.ones(16, 2, device=x.device)).sum()


def large_noise(self: Own, x: Any) -> Any:
    noise = torch.from_numpy(self.R.normal(size=limits.CONSTANT_BYTES // 2)).float()
    return torch.cat([x.flatten(), noise.to(x.device)])[-x.numel() :].view(x.shape) + x


@torch.compile(backend="eager")
def _compiled(x: Any) -> Any:
    return x * 2 + 1


def compiled(self: Own, x: Any) -> Any:
    return _compiled(x.as_tensor())


def array_written(self: Own, x: Any) -> Any:
    grid = torch.ones(64, 64, 64)
    grid.numpy()[0] = 2
    return x + grid.sum().to(x.device)


def drawn_before(self: Own, x: Any) -> Any:
    factor = np.random.uniform() + float(torch.rand(1)) + random.random() + mt.Randomizable.R.uniform()
    return torch.as_tensor(x.cpu().numpy() * factor, device=x.device)


def appended(self: Own, x: Any) -> Any:
    self.history.append(x)
    return x


REFUSED = [
    drawn_before,
    array_written,
    appended,
    compiled,
    hidden, suppressed, error_hidden, to_numpy, a_list, drawn_there, drawn_in_place, kept_in_a_list, pickled,
    other_thread, thread_in_place, autocast, large_noise,
]  # fmt: skip


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("function", REFUSED)
def test_what_is_refused(function: Callable[[Any, Any], Any], where: Where) -> None:
    outcome = ran(function, where)
    assert outcome.done == 2
    assert outcome.recorded.refused is not None
    assert (outcome.recorded.refused.step, outcome.recorded.refused.name) == (2, "Own")


def test_a_large_tensor_that_a_transform_adds_is_refused() -> None:
    def adds(self: Own, data: Any) -> Any:
        return {**data, "noise": torch.from_numpy(self.R.normal(size=limits.CONSTANTS_BYTES // 8 + 1))}

    outcome = run(own(adds, whole=True))
    assert outcome.done == 2 and outcome.why.endswith("bytes that are made on the CPU")


@pytest.mark.parametrize("name", ["batch_norm", "grid_sample"])
def test_what_is_made_of_other_operations_on_a_gpu_is_refused_for_one(name: str) -> None:
    def batch_norm(self: Own, x: Any) -> Any:
        return F.batch_norm(x.as_tensor()[None], None, None, training=True)[0]

    def grid_sample(self: Own, x: Any) -> Any:
        grid = torch.zeros(1, 4, 4, 2, device=x.device)
        return F.grid_sample(x.as_tensor()[:, 0][None], grid, align_corners=False)[0]

    function = {"batch_norm": batch_norm, "grid_sample": grid_sample}[name]
    assert run(own(function), AS_CUDA).why == f"{name} is another operation on a GPU"
    assert run(own(function), CPU).done is None


def test_a_volume_on_a_gpu_is_no_array_there_either() -> None:
    recorded = record(seeded(own(lambda self, x: torch.as_tensor(x.numpy())), 0), item(), AS_CUDA)
    assert recorded.refused is not None and "TypeError: can't convert a CUDA tensor" in recorded.refused.why


def test_the_first_function_to_be_compiled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch._dynamo.eval_frame", raising=False)
    outcome = record(seeded(own(lambda self, x: torch.compile(torch.sin)(x.as_tensor())), 0), item(), CPU)
    assert outcome.refused is not None and outcome.refused.why == "it uses a compiled function"


def test_a_result_that_requires_a_gradient_is_refused() -> None:
    recorded = record(seeded(own(lambda self, x: x.clone().requires_grad_()), 0), item(), CPU)
    assert recorded.refused is not None and recorded.refused.why == "its result requires a gradient"
    assert recorded.program is not None and recorded.program.done == 2


def test_nor_is_one_that_is_hidden_in_the_item() -> None:
    def hides(self: Own, x: Any) -> Any:
        x.meta["weights"] = {torch.ones(3, requires_grad=True)}
        return x

    recorded = record(seeded(own(hides), 0), item(), CPU)
    assert recorded.refused is not None and recorded.refused.why == "its result requires a gradient"


def test_another_device_is_refused() -> None:
    for device in ("cuda:1", 1, "meta"):
        recorded = record(seeded(own(lambda self, x, device=device: x.to(device)), 0), item(), AS_CUDA)
        assert recorded.refused is not None and recorded.refused.why.startswith("it uses the device")


def test_a_program_ends_before_what_makes_an_item_that_cannot_be_pickled() -> None:
    few = torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.qint8)
    for added, why in ((few, "quantized"), (lambda: 3, "pickle")):
        steps = own(lambda self, data, added=added: {**data, "added": added}, whole=True)
        outcome = record(seeded(steps, 0), item(), CPU)
        assert outcome.program is not None and outcome.program.done == 2
        assert outcome.refused is not None and outcome.refused.step == 2 and why in outcome.refused.why


def test_an_item_that_could_not_be_pickled_before_has_no_program() -> None:
    outcome = record(seeded(own(lambda self, x: x), 0), {**item(), "few": lambda: 3}, CPU)
    assert outcome.program is None and outcome.refused is not None
    assert outcome.refused.step == 0 and "pickle" in outcome.refused.why


def test_an_error_of_the_transform_is_a_refusal_and_the_eager_run_raises_it() -> None:
    make = own(lambda self, x: int("three"))
    recorded = record(seeded(make, 0), item(), CPU)
    assert recorded.refused is not None and "three" in recorded.refused.why
    with pytest.raises(RuntimeError) as caught:
        run(make)
    assert "three" in str(caught.value.__cause__ and caught.value.__cause__.__cause__)


def test_ctrl_c_is_raised_and_leaves_no_mode_behind() -> None:
    def interrupted(self: Own, x: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record(seeded(own(interrupted), 0), item(), CPU)
    assert not is_ghost(torch.ones(2) + torch.ones(1 << 20)[0])
    assert torch.ones(2).device.type == "cpu"


def test_constants_of_an_item_are_bounded() -> None:
    def several_constants(self: Own, x: Any) -> Any:
        for _ in range(limits.CONSTANTS_BYTES // limits.CONSTANT_BYTES + 2):
            noise = torch.from_numpy(self.R.normal(size=limits.CONSTANT_BYTES // 8))
            x = (
                x
                + torch.nn.functional.pad(noise, (0, 0))[: x.shape[-1]].to(x.device)
                + (noise.to(x.device) + x[0, 0, 0, 0]).mean()
            )
        return x

    outcome = run(own(several_constants))
    assert outcome.done == 2 and "made on the CPU" in outcome.why


# Guards


def test_a_bool_is_guessed_and_compared_at_the_replay() -> None:
    def brighter(self: Own, x: Any) -> Any:
        if x.max() > 4:
            x = x * 2
        return x + 1 if x.flatten()[0] else x - 1

    outcome = run(own(brighter))
    assert outcome.done is None
    assert outcome.wrong == 2  # one after the other, since the second may depend on the first
    assert [(guard.place, guard.guess) for guard in outcome.program.guards] == [((2, 0), True), ((2, 1), True)]


def test_a_bool_that_is_written_to_after_it_was_asked_for() -> None:
    def toggled(self: Own, x: Any) -> Any:
        flag = x.max() > 4
        x = x * 2 if flag else x
        return x + flag.logical_not_()

    outcome = run(own(toggled))
    assert outcome.done is None and outcome.wrong == 1


def test_a_transform_that_is_refused_on_the_way_of_a_wrong_guess_is_not() -> None:
    def checked(self: Own, x: Any) -> Any:
        if not x.isfinite().all():
            return x.cpu().numpy()
        if x.max() > 1:
            return x * 2
        raise ValueError("there is nothing in it")

    outcome = run(own(checked))
    assert outcome.done is None
    assert [guard.guess for guard in outcome.program.guards] == [True, True]


def test_an_error_on_the_way_of_a_wrong_guess_is_that_guess() -> None:
    def cropped(self: Own, x: Any) -> Any:
        return x if x.max() > 4 else x[..., :0].min()

    outcome = run(own(cropped))
    assert outcome.done is None and outcome.wrong == 1


def test_a_wrong_guess_tells_what_is_right() -> None:
    def darker(self: Own, x: Any) -> Any:
        return x * 2 if x.max() > 99 or x.min() < 99 else x

    of = item()
    program = record(seeded(own(darker), 0), of, CPU).program
    assert program is not None
    with pytest.raises(GuardFailed) as caught:
        replay(program, voxels(program, of), torch.device("cpu"))
    assert caught.value.found == {(2, 0): False, (2, 1): True}


def turned(self: Own, x: Any) -> Any:
    """Reads back what the device computes, several times, and computes with it in NumPy."""
    angle = torch.tensor(self.R.uniform(), device=x.device)
    matrix = torch.stack([angle.sin(), angle.cos(), -angle.sin(), angle.cos()]).reshape(2, 2)
    assert matrix.tolist() == matrix.tolist()
    inverse = np.linalg.inv(matrix.cpu().numpy().astype(np.float64))
    if float(matrix[0, 0]) > 0.5:
        matrix = matrix * 2
    matrix[0, 1] = 3
    return x * torch.as_tensor(inverse[0, 0], device=x.device) + matrix.cpu().numpy().sum() + matrix.sum()


@pytest.mark.parametrize("where", WHERE)
def test_values_that_the_device_computes_are_asked_of_it(where: Where) -> None:
    outcome = ran(turned, where)
    assert outcome.done is None
    assert not outcome.program.guards


def test_a_number_is_asked_for_again_once_it_was_written_to() -> None:
    def counts(self: Own, x: Any) -> Any:
        of_none = torch.linspace(0, 1, 3, device=x.device).exp()
        before = of_none.tolist()
        of_none.mul_(2)
        x.meta["counts"] = before, of_none.tolist()
        return x

    for where in (CPU, AS_CUDA):
        assert run(own(counts), where).done is None


def test_what_devices_make_of_nan_as_an_integer_is_asked_for() -> None:
    asked: list[Program] = []

    def label(self: Own, x: Any) -> Any:
        given = torch.tensor([1.5, float("nan")]).to(x.device)
        return x * (len(given.to(torch.int32).tolist()) + len(given.to(torch.float64).tolist()))

    def ask(program: Program) -> bytes:
        asked.append(program)
        return answered(program, torch.device("cpu"))

    assert record(seeded(own(label), 0), item(), AS_CUDA, ask=ask).refused is None
    assert len(asked) == 1


def test_what_the_device_answers_is_what_the_transform_reads() -> None:
    def shifted(self: Own, x: Any) -> Any:
        angle = torch.tensor(self.R.uniform(), device=x.device).sin()
        self.seen = angle.tolist()
        return x + self.seen

    asked: list[Program] = []

    def ask(program: Program) -> bytes:
        asked.append(pickle.loads(pickle.dumps(program)))
        return np.float32(0.125).tobytes()

    split, of = seeded(own(shifted), 0), item()
    program = record(split, of, AS_CUDA, ask=ask).program
    assert program is not None and len(asked) == 1 and not asked[0].boxes()
    got = replay(program, voxels(program, of), torch.device("cpu"))
    assert split.steps()[2].seen == 0.125
    first = seeded(own(lambda self, x: x), 0).after(copy.deepcopy(of))
    assert torch.equal(got[0]["image"], first[0]["image"] + 0.125)


def test_a_transform_whose_number_cannot_be_had_is_not_recorded() -> None:
    def ask(program: Program) -> bytes:
        raise RuntimeError("out of memory")

    recorded = record(seeded(own(turned), 0), item(), AS_CUDA, ask=ask)
    assert recorded.refused is not None and recorded.refused.why.endswith("computed later: out of memory")
    assert recorded.program is not None and recorded.program.done == 2


def test_values_that_many_threads_compute_are_asked_for_too() -> None:
    asked: list[Program] = []

    def total(self: Own, x: Any) -> Any:
        return x * float(torch.linspace(0, 1, 8).expand(1 << 14, 8).exp().sum())

    def ask(program: Program) -> bytes:
        asked.append(program)
        return answered(program, torch.device("cpu"))

    assert record(seeded(own(total), 0), item(), CPU, ask=ask).refused is None
    assert len(asked) == 1


def test_a_transform_of_very_many_operations_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_slice(self: Own, x: Any) -> Any:
        for number in range(x.shape[-1]):
            x[..., number] += 1
        return x

    assert run(own(by_slice), AS_CUDA).recorded.refused is None
    monkeypatch.setattr(limits, "PROGRAM_OPERATIONS", 20)
    assert run(own(by_slice), AS_CUDA).why == "up to it there are more than 20 operations"


def test_many_values_that_the_device_computes_are_refused() -> None:
    def field(self: Own, x: Any) -> Any:
        noise = torch.linspace(0, 1, limits.ASKED_BYTES, device=x.device).sin()
        return x + float(noise.cpu().numpy().mean())

    assert run(own(field), AS_CUDA).why == "it uses values that are computed later"


def test_what_a_transform_makes_on_the_cpu_is_told() -> None:
    def made(where: Where, device: str | None) -> dict[int, int]:
        modes = {"mode": ("bilinear", "nearest"), "device": device}
        affine = mt.RandAffined(BOTH, prob=1.0, rotate_range=(0.3, 0.0, 0.0), **modes)
        recorded = record(seeded(lambda: mt.Compose([mt.RandSpatialCropd(BOTH, (24,) * 3), affine]), 0), item(), where)
        assert recorded.program is not None and recorded.refused is None
        return dict(recorded.program.made)

    assert made(AS_CUDA, None)[1] > 2 * 4 * 4 * 24**3, "two grids"
    assert made(AS_CUDA, "cuda:0") == made(CPU, None) == {}


# Steps


@pytest.mark.parametrize("where", WHERE)
def test_part_of_a_tensor_that_is_changed_is_not_copied_onto_itself(where: Where) -> None:
    def brighter(self: Own, x: Any) -> Any:
        x = x.clone()
        x[0] *= 2
        x[..., 0] = x[..., 1]
        return x

    assert [op for op in ran(brighter, where).program.ops if "copy" in op] == ["aten::copy_.default"]
    assert (
        sum(
            step.op == ran(brighter, where).program.ops.index("aten::copy_.default")
            for step in steps_of(ran(brighter, where).program)
        )
        == 1
    )


@pytest.mark.parametrize("where", WHERE)
def test_indices_are_on_the_device(where: Where) -> None:
    program = ran(lambda self, x: x[:, [2, 1, 0]], where).program
    indices = [constant for constant in program.constants if constant.dtype == torch.int64]
    assert indices and all(constant.on_target == (where is not CPU) for constant in indices)


# What transforms keep


def test_a_tensor_that_is_kept_is_no_ghost_afterwards_and_whoever_reads_it_is_refused() -> None:
    def smoothed(self: Own, x: Any) -> Any:
        mean = x.mean()
        if self.kept is not None:
            mean = 0.5 * mean + 0.5 * self.kept
        self.kept = mean
        return x - mean

    split, of = seeded(own(smoothed), 0), item()
    first = record(split, of, CPU)
    assert first.refused is None and split.steps()[2].kept is None
    second = record(split, of, CPU)
    assert second.refused is not None and second.refused.step == 2
    assert split.steps()[2].kept is None


def test_a_tensor_that_is_kept_and_written_first_does_no_harm() -> None:
    def matrix(self: Own, x: Any) -> Any:
        self.kept = torch.exp(torch.eye(3, device=x.device))
        return x * self.kept.sum()

    split, of = seeded(own(matrix), 0), item()
    for _ in range(3):
        assert record(split, of, AS_CUDA).refused is None
        assert split.steps()[2].kept is None


def test_what_a_transform_kept_is_forgotten_with_it() -> None:
    class Unhashable(Own):
        __hash__ = None  # type: ignore[assignment]

    def keeps(self: Own, x: Any) -> Any:
        self.kept = x.mean()
        return x - self.kept

    before = len(kept._kept)
    split = seeded(lambda: Unhashable(keeps), 0)
    for _ in range(2):
        assert record(split, item(), CPU).refused is None
    assert len(kept._kept) == before + 1
    del split
    gc.collect()
    assert len(kept._kept) == before


@pytest.mark.parametrize("target", ["cpu", "cuda:0"])
def test_what_was_refused_leaves_no_ghost(target: str) -> None:
    def keeps(self: Own, x: Any) -> Any:
        self.history.append(x)
        self.kept = {"net": Big().to(x.device)}
        return x

    split = seeded(own(keeps), 0)
    step = split.steps()[2]
    record(split, item(), Where(target, "cpu"))
    assert step.history == [] and step.kept is None


def test_a_module_that_moved_is_where_it_was() -> None:
    split = seeded(own(network), 0)
    step = split.steps()[2]
    step.kept = Big()
    values, held = copy.deepcopy(step.kept.state_dict()), list(step.kept.parameters())
    for _ in range(2):
        assert record(split, item(), AS_CUDA).refused is None
        found = step.kept.state_dict()
        assert all(torch.equal(values[name], found[name]) for name in values)
        assert all(isinstance(p, torch.nn.Parameter) and p.requires_grad for p in step.kept.parameters())
        assert not any(map(is_ghost, held)), "as an optimizer holds them"


# Programs


def test_boxes_are_those_of_each_crop() -> None:
    outcome = run(lambda: mt.RandSpatialCropSamplesd(BOTH, (5, 6, 7), 3))
    boxes = outcome.program.boxes()
    assert [len(found) for found in boxes.values()] == [3, 3]
    assert {tuple(axis.stop - axis.start for axis in box) for box in boxes["image"]} == {(5, 6, 7)}


@pytest.mark.parametrize(
    ("index", "box"),
    [
        ((slice(None),), ((0, 6), (0, 5), (0, 4))),
        ((0, slice(1, 4), slice(2, 5), slice(1, 2)), ((1, 4), (2, 5), (1, 2))),
        ((slice(None), 3, 2, 1), ((3, 4), (2, 3), (1, 2))),
        ((1, slice(0, 6, 2), slice(1, 5, 3)), ((0, 5), (1, 5), (0, 4))),
        ((0, 2), ((2, 3), (0, 5), (0, 4))),
    ],
)
def test_the_box_of_a_view(index: Any, box: Any) -> None:
    whole = torch.arange(2 * 6 * 5 * 4).reshape(2, 6, 5, 4)
    part = whole[index].transpose(0, -1) if whole[index].dim() else whole[index]
    view = View("image", tuple(part.shape), part.stride(), int(part.storage_offset()))
    assert tuple((axis.start, axis.stop) for axis in view.box(whole.shape)) == box


def test_the_box_of_a_view_that_is_no_crop_holds_it() -> None:
    shape = (2, 6, 5, 4)
    windows = torch.empty(shape, device="meta").unfold(2, 3, 1)[0, 1:3]
    found = View("image", tuple(windows.shape), windows.stride(), int(windows.storage_offset())).box(shape)
    assert found == (slice(1, 3), slice(0, 5), slice(0, 4))
    assert View("image", (240,), (1,), 0).box(shape) == (slice(0, 6), slice(0, 5), slice(0, 4))
    assert View("image", (3,), (1,), 1).box((7,)) == (slice(0, 1), slice(0, 1), slice(1, 4))


def test_a_program_is_plain_and_small() -> None:
    of = item()
    del of["fg"], of["bg"]
    program = run(own(torch_only), of=of).program
    assert b"torch._utils" not in pickle.dumps(program)
    assert len(pickle.dumps(program)) < 30_000


def test_forms_tell_operations_apart() -> None:
    same = [run(own(torch_only), seed=seed).program.form for seed in (0, 0)]
    assert same[0] == same[1]
    assert run(own(in_place)).program.form[2] != same[0][2]
    assert run(own(in_place)).program.form[:2] == same[0][:2]


def test_another_default_dtype_gives_ghosts_of_that_dtype() -> None:
    seen = []

    def halved(self: Own, x: Any) -> Any:
        half = x.to(torch.int32) / 2
        seen.append(half.dtype)
        return half

    try:
        for dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            run(own(halved))
            assert set(seen) == {dtype}
            seen.clear()
    finally:
        torch.set_default_dtype(torch.float32)


def test_views_and_constants_are_there_once_and_dead_values_are_dropped() -> None:
    def again(self: Own, x: Any) -> Any:
        twice = x * 2
        for _ in range(5):
            x = x + twice[:, :4].sum() * torch.tensor([1.5])
        return x

    program = run(own(again)).program
    assert len(program.constants) == 1
    assert [program.ops[step.op] for step in steps_of(program)].count("aten::slice.Tensor") == 1
    alive = len(program.views) + len(program.constants)
    for step in steps_of(program):
        alive += len(set(step.outs)) - len(step.dead)
        assert alive < 9


def test_constants_for_the_device_come_first() -> None:
    def mixed(self: Own, x: Any) -> Any:
        return x * torch.tensor([1.0, 2.0]).to(x.device).sum() * torch.tensor(3.0) + torch.tensor([4]).to(x.device)

    program = run(own(mixed), AS_CUDA).program
    assert [constant.on_target for constant in program.constants] == [True] * 3 + [False]  # and the item's "start"
    assert program.constants[3].offset >= program.uploaded > program.constants[2].offset


def test_most_ends_a_program_early() -> None:
    of = item()
    split = seeded(own(torch_only), 0)
    forms = {name: (of[name].dtype, tuple(of[name].shape)) for name in BOTH}

    def make(ghosts: dict[str, torch.Tensor]) -> Any:
        return {name: ghost.as_subclass(MetaTensor) for name, ghost in ghosts.items()}

    recorder = Recorder(forms, torch.device("cpu"))
    recorded = recorder.record(split.steps(), split.step, make, most=1)
    assert recorded.program is not None and recorded.program.done == 1
    assert recorded.refused is not None and recorded.refused.step == 1
    assert recorder.record(split.steps(), split.step, make, most=0).program is None


def test_names_are_those_of_whole_volumes_that_nobody_wrote_to() -> None:
    of = item()
    forms = {name: (of[name].dtype, tuple(of[name].shape)) for name in BOTH}
    recorder = Recorder(forms, torch.device("cpu"))
    found = []

    def apply(step: Any, data: Any) -> Any:
        found.append([recorder.name_of(data[name]) for name in ("image", "label", "other")])
        return step(data)

    def make(ghosts: dict[str, torch.Tensor]) -> Any:
        return {**ghosts, "other": torch.zeros(2)}

    def write(data: Any) -> Any:
        data["label"].add_(1)
        return data

    assert recorder.record([write, write], apply, make).refused is None
    assert found == [["image", "label", None], ["image", None, None]]


def test_a_replay_is_under_no_ones_gradient_or_inference_mode() -> None:
    of = item()
    program = record(seeded(own(torch_only), 0), of, CPU).program
    assert program is not None
    volumes = {name: Voxels(of[name].as_tensor(), boxes) for name, boxes in program.boxes().items()}
    with torch.inference_mode():
        found = tensors(replay(program, volumes, torch.device("cpu")))
    assert not any(tensor.is_inference() or tensor.requires_grad for tensor in found)
    assert all(
        torch.equal(a, b) for a, b in zip(found, tensors(replay(program, volumes, torch.device("cpu"))), strict=True)
    )


def test_volumes_of_ones_own_are_not_copied() -> None:
    def make() -> Any:
        return mt.Compose([mt.RandSpatialCropd(BOTH, (9, 9, 9)), Own(in_place), Own(to_numpy)])

    of = item()
    program = record(seeded(make, 0), of, CPU).program
    assert program is not None
    volumes = voxels(program, of)
    got = replay(program, volumes, torch.device("cpu"), shared=False)
    for name in BOTH:
        assert got[name].untyped_storage().data_ptr() == volumes[name].data.untyped_storage().data_ptr()
    assert volumes["image"].changed() and not volumes["label"].changed()
    assert torch.equal(got["image"], replay(program, voxels(program, of), torch.device("cpu"))["image"])


def test_copies_lie_as_the_views_do() -> None:
    whole = torch.arange(1000.0)
    views = [whole[3:40], whole[70:90:2]]
    copies = _copied(views)
    places = [[tensor.data_ptr() % 64 for tensor in some] for some in (views, copies)]
    assert places[0] == places[1] and all(map(torch.equal, views, copies))


def test_a_view_of_nothing_needs_no_volume() -> None:
    outcome = run(lambda: Own(lambda self, data: {"a": data["image"][:, :0], "age": 3}, whole=True))
    assert outcome.program.boxes() == {}
    assert outcome.got["a"].shape == (1, 0, *SHAPE[1:])


def test_recordings_do_not_pile_up() -> None:
    split, of = seeded(own(torch_only), 0), item()
    gone = []
    for _ in range(3):
        recorder = Recorder({name: (of[name].dtype, tuple(of[name].shape)) for name in BOTH}, torch.device("cpu"))
        recorder.record(split.steps(), split.step, lambda ghosts: dict(ghosts))
        gone.append(weakref.ref(recorder._recording))
        del recorder
    assert not any(ref() for ref in gone)
