"""The colour stage against torchvision v2's float path, sample by sample, and what it promises about rows."""

import dataclasses

import numpy as np
import pytest
import torch
import torchvision.transforms.v2.functional as V

from moco_ray.data import augment as stage
from moco_ray.data.augment import apply_colour, colour_stage, draw_colour, normalise
from moco_ray.recipe import Augment

V1 = Augment(jitter=(0.4, 0.4, 0.4, 0.4), jitter_probability=1.0, grayscale_first=True, blur_probability=0.0)
V2 = Augment()
DEMO = Augment(jitter=(0.4, 0.4, 0.4, 0.0), blur_probability=0.0)
PLAIN = Augment(jitter=(0, 0, 0, 0), grayscale_probability=0, blur_probability=0, flip_probability=0)
ONLY_CONTRAST = PLAIN.model_copy(update={"jitter": (0.0, 0.4, 0.0, 0.0), "jitter_probability": 1.0})
RADIUS = 6  # of a blur of at most sigma 2


@pytest.fixture(autouse=True)
def _one_thread(_few_threads):
    """These images are small: on a busy machine a second thread is mostly waited for."""
    torch.set_num_threads(1)


def photographs(rows: int, pixels: int, seed: int = 0) -> torch.Tensor:
    """rows,P,P,3 uint8: smooth colours with noise, and patches that are black, white, gray and fully saturated."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:pixels, 0:pixels] / pixels
    phase, pace = rng.uniform(0, 6, (rows, 1, 1, 3)), rng.uniform(2, 12, (rows, 1, 1, 3))
    image = 128 + 110 * np.sin(pace * x[..., None] + pace[..., ::-1] * y[..., None] + phase)
    image += rng.normal(0, 8, image.shape)
    patches = [(0, 0, 0), (255, 255, 255), (90, 90, 90), (255, 0, 0), (0, 255, 255), (17, 17, 240)]
    for place, colour in enumerate(patches):
        image[:, pixels // 2 : pixels // 2 + 4, 4 * place : 4 * place + 4] = colour
    return torch.from_numpy(image.clip(0, 255).astype(np.uint8))


def unit(crops: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return crops.permute(0, 3, 1, 2).to(dtype).div(255).contiguous()


def torchvision_reading(x: torch.Tensor, parameters: stage.ColourParameters, row: int, first: bool) -> torch.Tensor:
    """One image 3,P,P through torchvision's functions, one at a time."""
    jitter = (V.adjust_brightness, V.adjust_contrast, V.adjust_saturation, V.adjust_hue)
    if parameters.grayscale[row] and first:
        x = V.rgb_to_grayscale(x, num_output_channels=3)
    if parameters.jitter[row]:
        for op in parameters.order[row]:
            x = jitter[op](x, float(parameters.factors[row, op]))
    if parameters.grayscale[row] and not first:
        x = V.rgb_to_grayscale(x, num_output_channels=3)
    if parameters.sigma[row]:
        x = V.gaussian_blur(x, [2 * RADIUS + 1] * 2, [float(parameters.sigma[row])] * 2)
    return V.horizontal_flip(x) if parameters.flip[row] else x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("recipe", [V1, V2, DEMO], ids=["v1", "v2", "demo"])
def test_each_row_is_torchvisions_float_path_with_the_same_parameters(recipe, dtype):
    rows = 40
    x = unit(photographs(rows, 32), dtype)
    parameters = draw_colour(np.arange(rows), 1, 7, 2, recipe)
    ours = apply_colour(x.clone(), parameters, recipe)
    theirs = torch.stack([torchvision_reading(x[r], parameters, r, recipe.grayscale_first) for r in range(rows)])
    difference = (ours - theirs).abs() * 255
    blurred = torch.from_numpy(parameters.sigma > 0)
    assert blurred.any() == (recipe is V2) and parameters.grayscale.any() and not parameters.grayscale.all()
    assert difference[~blurred].max() < 0.2
    if blurred.any():
        assert difference[blurred][..., RADIUS:-RADIUS, RADIUS:-RADIUS].max() < 0.2


def test_blur_is_a_gaussian_whose_border_is_repeated():
    x = unit(photographs(2, 20), torch.float64)
    sigma = np.array([2.0, 0.7])
    ours = apply_colour(x.clone(), dataclasses.replace(still(2), sigma=sigma), V2)
    for row, s in enumerate(sigma):
        taps = np.arange(-6, 7)
        weights = np.exp(-(taps**2) / (2 * s * s))
        weights /= weights.sum()
        near = (np.arange(20)[:, None] + taps).clip(0, 19)  # P,13: the pixel that each tap reads
        image = x[row].numpy()
        lines = (image[:, :, near] * weights).sum(-1)
        loop = (lines[:, near, :] * weights[:, None]).sum(2)
        np.testing.assert_allclose(ours[row].numpy(), loop, atol=1e-14)


def still(rows: int) -> stage.ColourParameters:
    """Parameters that change nothing."""
    no = np.zeros(rows, dtype=bool)
    factors = np.tile(stage.NEUTRAL, (rows, 1))
    return stage.ColourParameters(no, np.tile(np.arange(4), (rows, 1)), factors, no, np.zeros(rows), no)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "rows, pixels, recipe",
    [(12, 25, V2), (4, 256, ONLY_CONTRAST)],  # 256: of one row alone, torch splits the sum among its threads
    ids=["all of v2", "one row's mean in several threads"],
)
def test_a_row_is_the_same_bits_alone_in_a_part_and_in_any_order(rows, pixels, recipe, dtype):
    torch.set_num_threads(2)
    crops, positions = photographs(rows, pixels), np.arange(100, 100 + rows)
    whole = colour_stage(crops, positions, 0, 1, 0, recipe, dtype)
    for chosen in (*([row] for row in range(rows)), [2, 0, 1], list(range(rows))[::-1]):
        part = colour_stage(crops[chosen], positions[chosen], 0, 1, 0, recipe, dtype)
        assert torch.equal(part, whole[chosen])


def test_seed_epoch_position_and_view_each_change_the_result():
    crops = photographs(8, 16)
    base = {"positions": np.arange(8), "view": 0, "seed": 0, "epoch": 0}
    first = colour_stage(crops, augment=V1, **base)
    assert torch.equal(first, colour_stage(crops, augment=V1, **base))
    for name, other in (("positions", np.arange(8) + 8), ("view", 1), ("seed", 1), ("epoch", 1)):
        changed = colour_stage(crops, augment=V1, **{**base, name: other})
        assert ((changed - first).abs().amax((1, 2, 3)) > 0.01).all(), name


def test_drawn_parameters_have_the_recipes_ranges_and_probabilities():
    n = 20_000
    recipe = Augment(jitter=(0.4, 0.3, 0.2, 0.1), blur_sigma=(0.5, 1.5), flip_probability=0.3)
    drawn = draw_colour(np.arange(n), 0, 0, 0, recipe)
    rates = (
        (drawn.jitter, 0.8),
        (drawn.grayscale, 0.2),
        (drawn.sigma > 0, 0.5),
        (drawn.flip, 0.3),
    )
    for chosen, probability in rates:  # 4 standard deviations of a binomial: a false alarm in 16,000
        assert abs(chosen.mean() - probability) < 4 * np.sqrt(probability * (1 - probability) / n)
    ranges = [(0.6, 1.4), (0.7, 1.3), (0.8, 1.2), (-0.1, 0.1), (0.5, 1.5)]
    for values, (low, high) in zip([*drawn.factors.T, drawn.sigma[drawn.sigma > 0]], ranges, strict=True):
        assert low <= values.min() and values.max() < high
        counts = np.histogram(values, bins=10, range=(low, high))[0]
        expected = len(values) / 10
        assert ((counts - expected) ** 2 / expected).sum() < 33.7  # chi squared, 9 degrees of freedom: p = 1e-4


def test_all_24_orders_of_the_jitter_are_equally_likely():
    order = draw_colour(np.arange(20_000), 0, 0, 0, V2).order
    assert (np.sort(order, axis=1) == np.arange(4)).all()
    _, counts = np.unique(order, axis=0, return_counts=True)
    expected = 20_000 / 24
    assert len(counts) == 24
    assert ((counts - expected) ** 2 / expected).sum() < 57.1  # chi squared, 23 degrees of freedom: p = 1e-4


def test_the_parameters_of_a_row_are_drawn_independently_of_each_other():
    d = draw_colour(np.arange(20_000), 0, 0, 0, V2)
    flags = (d.jitter, d.grayscale, d.sigma > 0, d.flip, d.order[:, 0] == 0)
    correlation = np.corrcoef([*flags, *d.factors.T]) - np.eye(9)
    assert np.abs(correlation).max() < 4.5 / np.sqrt(20_000)


def test_operations_without_a_strength_or_a_probability_are_never_computed(monkeypatch):
    def refuse(*_):
        raise AssertionError("computed though it can change nothing")

    for name in ("_turn_hue", "_blur"):
        monkeypatch.setattr(stage, name, refuse)
    colour_stage(photographs(64, 16), np.arange(64), 0, 0, 0, DEMO)
    for name in ("_gray", "_to_gray"):
        monkeypatch.setattr(stage, name, refuse)
    colour_stage(photographs(64, 16), np.arange(64), 0, 0, 0, PLAIN)
    with pytest.raises(AssertionError, match="can change nothing"):
        colour_stage(photographs(64, 16), np.arange(64), 0, 0, 0, V2)


def test_hue_and_blur_are_computed_for_the_rows_that_drew_them_only(monkeypatch):
    seen = {"_turn_hue": 0, "_blur": 0}
    for name in seen:
        original = getattr(stage, name)

        def count(rows, other, name=name, original=original):
            seen[name] += len(rows)
            return original(rows, other)

        monkeypatch.setattr(stage, name, count)
    drawn = draw_colour(np.arange(64), 0, 0, 0, V2)
    colour_stage(photographs(64, 16), np.arange(64), 0, 0, 0, V2)
    assert seen == {"_turn_hue": drawn.jitter.sum(), "_blur": (drawn.sigma > 0).sum()}
    assert 0 < seen["_turn_hue"] < 64 and 0 < seen["_blur"] < 64


def test_without_augmentation_both_stages_are_the_plain_normalisation():
    crops = photographs(4, 24)
    reference = V.normalize(unit(crops, torch.float64), list(PLAIN.mean), list(PLAIN.std))
    for x in (
        normalise(crops, PLAIN, torch.float64),
        colour_stage(crops, np.arange(4), 0, 0, 0, PLAIN, torch.float64),
    ):
        torch.testing.assert_close(x, reference, rtol=0, atol=1e-14)
        assert x.is_contiguous(memory_format=torch.channels_last)


def test_the_colour_stage_normalises_what_apply_colour_gives():
    crops = photographs(16, 24)
    x = apply_colour(unit(crops, torch.float64), draw_colour(np.arange(16), 1, 2, 3, V2), V2)
    stage_output = colour_stage(crops, np.arange(16), 1, 2, 3, V2, torch.float64)
    reference = V.normalize(x, list(V2.mean), list(V2.std))
    torch.testing.assert_close(stage_output, reference, rtol=0, atol=1e-14)


def test_autocast_around_the_stage_does_not_reach_into_it():
    crops = photographs(16, 24)
    plain = colour_stage(crops, np.arange(16), 0, 0, 0, V2)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(colour_stage(crops, np.arange(16), 0, 0, 0, V2), plain)


def test_nothing_is_read_back_from_the_device():
    # A tensor on the meta device has no values: whatever waited for one would raise.
    x = torch.empty(32, 3, 24, 24, device="meta")
    for recipe in (V1, V2):
        assert apply_colour(x, draw_colour(np.arange(32), 0, 0, 0, recipe), recipe).is_meta


def test_float16_stays_near_float32():
    crops = photographs(48, 32)
    full, half = (colour_stage(crops, np.arange(48), 0, 0, 0, V2, t) for t in (torch.float32, torch.float16))
    pixel_error = (full - half.float()).abs() * 0.226 * 255  # 0.226: about the std that it was divided by
    assert half.dtype == torch.float16 and pixel_error.mean() < 0.1 and pixel_error.max() < 3.0


def test_the_callers_crops_are_left_as_they_were():
    crops = photographs(16, 24)
    before = crops.clone()
    colour_stage(crops, np.arange(16), 0, 0, 0, V2)
    normalise(crops, V2)
    assert torch.equal(crops, before)


def test_crops_of_another_kind_are_refused_by_name():
    crops = photographs(4, 16)
    with pytest.raises(ValueError, match="bfloat16"):
        normalise(crops, V2, torch.bfloat16)
    with pytest.raises(ValueError, match="uint8"):
        normalise(crops.float(), V2)
    with pytest.raises(ValueError, match="N,P,P,3"):
        colour_stage(crops.permute(0, 3, 1, 2), np.arange(4), 0, 0, 0, V2)
    with pytest.raises(ValueError, match="4 crops have 3 positions"):
        colour_stage(crops, np.arange(3), 0, 0, 0, V2)
