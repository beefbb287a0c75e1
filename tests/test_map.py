"""The two-dimensional map of features: a plane that was put in comes out, and nothing in it is drawn by chance."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from moco_ray.evaluate.map import SHOWN, map_picture, project


def planted(rows: int = 60) -> tuple[torch.Tensor, torch.Tensor]:
    """Features N,16 of unit length that differ in two directions only, at right angles, and the coordinates N,2 along them."""
    draw = torch.Generator().manual_seed(4)
    places = (torch.rand(rows, 2, generator=draw) - 0.5) * torch.tensor([0.5, 0.25])
    basis = torch.linalg.qr(torch.randn(16, 3, generator=draw))[0]
    height = (1 - places.square().sum(1, keepdim=True)).sqrt()  # on the sphere
    return torch.cat([places, height], 1) @ basis.T, places


def test_a_planted_plane_comes_out_with_its_distances_whatever_the_features_length():
    features, places = planted()
    found = project(features * torch.linspace(0.1, 9.0, len(features)).unsqueeze(1))
    torch.testing.assert_close(torch.cdist(found.places, found.places), torch.cdist(places, places), atol=0.03, rtol=0.0)
    assert found.explained[0] > found.explained[1] > 0.05 and sum(found.explained) > 0.99
    variance = places.var(0)
    assert found.explained[0] == pytest.approx(float(variance[0] / variance.sum()), abs=0.02)


def test_a_map_is_the_same_each_time_in_any_order_and_of_features_turned_over():
    features, _ = planted()
    found = project(features)
    torch.testing.assert_close(project(features).places, found.places, atol=0.0, rtol=0.0)
    torch.testing.assert_close(project(features.flip(0)).places.flip(0), found.places)
    torch.testing.assert_close(project(-features).places, -found.places)  # the sign is the direction's, not the points'


def test_two_rows_and_equal_rows_have_a_map():
    two = project(torch.eye(2, 5))
    assert two.places.shape == (2, 2) and two.explained == pytest.approx((1.0, 0.0))
    same = project(torch.ones(4, 5))
    assert torch.isfinite(same.places).all() and float(same.places.abs().max()) < 1e-6


def test_the_picture_shows_each_image_near_its_place_and_of_many_an_even_choice():
    features, _ = planted()
    found = project(features)
    thumbs = np.zeros((60, 8, 8, 3), np.uint8)
    most_right = int(found.places[:, 0].argmax())
    thumbs[:] = (0, 0, 200)
    thumbs[most_right] = (200, 0, 0)
    picture = np.asarray(Image.open(io.BytesIO(map_picture(found, thumbs, "60 images"))).convert("RGB")).astype(int)
    red = (picture[..., 0] > 150) & (picture[..., 1] < 60) & (picture[..., 2] < 60)
    blue = (picture[..., 2] > 150) & (picture[..., 0] < 60)
    columns = np.flatnonzero(red.any(0))
    assert 15 < len(columns) < 80 and columns.max() > np.flatnonzero(blue.any(0)).max()
    many = project(torch.cat([features] * 10))
    halves = np.zeros((600, 8, 8, 3), np.uint8)
    halves[:] = (0, 0, 200)
    halves[540:] = (200, 0, 0)  # the last class of a sorted set
    picture = np.asarray(Image.open(io.BytesIO(map_picture(many, halves, "600 images"))).convert("RGB")).astype(int)
    assert len(halves) > SHOWN and ((picture[..., 0] > 150) & (picture[..., 1] < 60) & (picture[..., 2] < 60)).sum() > 1000
