"""A drawn sample of a data set's images: do they decode, and are some of them equal?

Not responsible for decoding (data/decode.py) nor for what training does with a bad image (data/segment.py).
"""

import hashlib
import math
from collections import Counter

import numpy as np

from moco_ray.checks.finding import Finding, failed, few, mistake, ok, warning
from moco_ray.data.decode import BadImage, decode
from moco_ray.data.segment import read_rows
from moco_ray.data.shards import Manifest
from moco_ray.errors import UserError
from moco_ray.recipe import Recipe

DECODED_ROWS = 64
COMPARED_ROWS = 1024  # those come with the pieces that are read for the others
SAMPLE_CHUNKS, SAMPLE_BYTES = 64, 256 << 20  # of which pieces are read whole
SURE = 0.01  # chance of so many bad images in the sample, or more, if the data set holds no more than is allowed
MANY_TWINS = 0.05  # of the sample


def about_images(manifest: Manifest, recipe: Recipe) -> list[Finding]:
    """Both findings, from one sample drawn with the recipe's seed."""
    try:
        sample = read_rows(manifest, sample_rows(manifest, recipe.run.seed))
    except UserError as error:
        return [mistake("images", error)]
    return [decodable(manifest, sample, recipe), duplicates(sample, manifest.rows)]


def sample_rows(manifest: Manifest, seed: int) -> np.ndarray:
    """Up to COMPARED_ROWS row numbers in drawn order, from so few pieces that no more than SAMPLE_BYTES are read."""
    draw = np.random.default_rng([seed, 0xD0C])
    chunks = draw.permutation(len(manifest.chunk_rows))
    most = max(SAMPLE_CHUNKS, math.ceil(COMPARED_ROWS / max(1.0, manifest.chunk_rows.mean())))
    fit = int(np.searchsorted(np.cumsum(manifest.chunk_bytes[chunks]), SAMPLE_BYTES, side="right"))
    chunks = chunks[: max(1, min(most, fit))]
    first = manifest.first_row[chunks]
    each = math.ceil(COMPARED_ROWS / len(chunks))
    rows = [start + draw.permutation(count)[:each] for start, count in zip(first, manifest.chunk_rows[chunks], strict=True)]
    return draw.permutation(np.concatenate(rows))[:COMPARED_ROWS]


def decodable(manifest: Manifest, sample: dict[int, bytes], recipe: Recipe) -> Finding:
    """Decode DECODED_ROWS of the sample; bad ones are counted by kind."""
    rows = np.random.default_rng(recipe.run.seed).permutation(np.array(sorted(sample)))[:DECODED_ROWS].tolist()
    bad: dict[int, BadImage] = {}
    for row in rows:
        try:
            decode(sample[row], recipe.data.max_image_pixels)
        except BadImage as error:
            bad[row] = error
    if not bad:
        return ok("images", f"{len(rows)} drawn images decode")
    kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(error.kind for error in bad.values()).most_common())
    found = f"{len(bad)} of {len(rows)} drawn images do not decode ({kinds}): {few(map(manifest.source, bad), 3)}"
    allowed = recipe.data.max_bad_rows_fraction
    cure = "`moco-ray pack` leaves bad images out and lists them"
    if len(rows) == manifest.rows and len(bad) > allowed * len(rows) or chance_of(len(bad), len(rows), allowed) < SURE:
        return failed("images", found, f"{cure}; or raise data.max_bad_rows_fraction, which is {allowed:g}")
    return warning("images", found, cure)


def chance_of(bad: int, drawn: int, share: float) -> float:
    """Of at least so many bad images among those drawn, if `share` of all are bad (binomial)."""
    return 1.0 - sum(math.comb(drawn, k) * share**k * (1 - share) ** (drawn - k) for k in range(bad))


def duplicates(sample: dict[int, bytes], rows: int) -> Finding:
    """Images of the sample that equal another one byte for byte. A pair in a small sample of many rows means very many."""
    counts = Counter(hashlib.sha256(content).digest() for content in sample.values() if content)
    twins, drawn = sum(count for count in counts.values() if count > 1), len(sample)
    if not twins:
        return ok("duplicates", f"no two of {drawn:,} drawn images are equal")
    pairs = sum(count * (count - 1) // 2 for count in counts.values())
    found = f"{twins} of {drawn:,} drawn images equal another of them"
    if drawn < rows:
        found += f"; over all {rows:,} rows that is about {pairs * (rows - 1) / math.comb(drawn, 2):.2g} twins for each image"
    cure = "`moco-ray pack --drop-duplicates`: equal images are each other's negatives"
    return (failed if twins > MANY_TWINS * drawn else warning)("duplicates", found, cure)
