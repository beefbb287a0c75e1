"""Pictures of a step, made in the driver: the two views of some rows, and the wall of queries beside their hardest negatives.

Responsible for finding and fetching the images that queued keys were made of, in a thread of its own so that nobody waits for a
storage, and for drawing. Not responsible for what is measured (exhibit.py), nor for files (monitor.py).
"""

import io
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from moco_ray.data.decode import BadImage, decode
from moco_ray.data.order import EpochOrder
from moco_ray.data.segment import read_rows
from moco_ray.data.shards import Manifest
from moco_ray.data.whereabouts import UNKNOWN, rows_of_slots
from moco_ray.exhibit import THUMB_PIXELS
from moco_ray.plan import Plan

MOST_WAITING = 2  # steps whose images are being fetched: of a storage that is slower than the training, later ones are left out
GAP, LINE, FONT_PIXELS = 8, 15, 12
PAPER, INK, FAINT, QUERY, ALARM = "white", "#222222", "#777777", "#d1662a", "#c00000"
JPEG_QUALITY = 90


class Pictures(NamedTuple):
    """Of one step: by tag, for monitor.Journal.pictures. `flaw`: why there is no wall, "" if there is one."""

    step: int
    images: dict[str, tuple[bytes, int, int]]
    histograms: dict[str, dict[str, Any]]
    flaw: str = ""


class Gallery:
    """One driver's. `hang` takes what a rank sent, `finished` gives the pictures that are ready; neither waits."""

    def __init__(self, manifest: Manifest, plan: Plan, first_step: int):
        """`first_step`: at which the run began: 0, but for one that carries on a checkpoint of the released code."""
        self._manifest, self._plan, self._first_step = manifest, plan, first_step
        self._order = lru_cache(maxsize=4)(lambda epoch: EpochOrder(manifest.chunk_rows, plan, plan.recipe.run.seed, epoch))
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="gallery")
        self._waiting: list[Future[Pictures]] = []

    def hang(self, message: dict[str, Any]) -> None:
        """`message`: what exhibit.exhibit gave, and the step that was completed."""
        if len(self._waiting) < MOST_WAITING:
            self._waiting.append(self._threads.submit(self._draw, message))

    def finished(self, wait_seconds: float = 0.0) -> list[Pictures]:
        wait(self._waiting, wait_seconds)
        done = [each for each in self._waiting if each.done()]
        self._waiting = [each for each in self._waiting if not each.done()]
        return [each.result() for each in done]

    def close(self) -> None:
        """What is at work ends with the process, or in its own time."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _draw(self, message: dict[str, Any]) -> Pictures:
        step, images, flaw = message["step"], {}, ""
        try:
            images["pictures/two_views"] = _jpeg(views_sheet(message["views"], step))
            rows = self._rows(message)
            images["pictures/hardest_negatives"] = _jpeg(wall(message, rows, self._thumbs(rows), self._plan.recipe.contrast.temperature))
        except Exception as error:  # noqa: BLE001  whatever it is, it costs the picture and not the run
            flaw = f"no picture of the hardest negatives of step {step}: {error}"
        histograms = {f"similarity/{name}": counts for name, counts in message["histograms"].items()}
        return Pictures(step, images, histograms, flaw)

    def _rows(self, message: dict[str, Any]) -> np.ndarray:
        """Q,k manifest rows of the negatives, UNKNOWN for noise."""
        slots = message["slots"].ravel()
        steps = np.full(self._plan.recipe.contrast.queue_keys, UNKNOWN, np.int64)
        steps[slots], steps[message["position"] - 1] = message["made"].ravel(), message["newest"]
        found = rows_of_slots(steps, message["position"], self._plan, self._order, slots, self._first_step)
        return found.reshape(message["slots"].shape)

    def _thumbs(self, rows: np.ndarray) -> dict[int, Image.Image]:
        """The images of these rows, as far as they can be decoded, whole and small."""
        thumbs = {}
        for row, encoded in read_rows(self._manifest, rows[rows != UNKNOWN]).items() if (rows != UNKNOWN).any() else ():
            try:
                pixels = decode(encoded, self._plan.recipe.data.max_image_pixels).permute(1, 2, 0).numpy()
            except BadImage:
                continue  # it was replaced in its step, and is in quarantine.jsonl
            thumbs[row] = _square(Image.fromarray(pixels))  # at once: of photos as large as data.max_image_pixels thirty would fill the driver's memory
        return thumbs


def views_sheet(views: np.ndarray, step: int) -> Image.Image:
    """views V,2,T,T,3 uint8: pairs of a query's view and its key's, four pairs a line."""
    pairs, cell = 4, THUMB_PIXELS + GAP
    lines = -(-len(views) // pairs)
    width, top = pairs * (2 * cell + 2 * GAP) + GAP, 2 * LINE + GAP
    sheet, draw = _paper(width, top + lines * (cell + GAP) + GAP)
    draw.text((GAP, GAP), f"step {step}: the query's view and the key's view of {len(views)} images, as the two encoders see them", INK, _font())
    for number, pair in enumerate(views):
        line, column = divmod(number, pairs)
        left, y = GAP + column * (2 * cell + 2 * GAP), top + line * (cell + GAP)
        for view, pixels in enumerate(pair):
            sheet.paste(_square(Image.fromarray(pixels)), (left + view * (THUMB_PIXELS + 2), y))
    return sheet


def wall(message: dict[str, Any], rows: np.ndarray, thumbs: dict[int, Image.Image], temperature: float) -> Image.Image:
    """A line for each query: its view, its key's view, and its hardest queued negatives, each with similarity and age.

    `rows` Q,k: the manifest row of each negative, UNKNOWN for noise; `thumbs` by row. A negative that weighs more than the positive is
    marked, and one that is the query's own image.
    """
    count, negatives = rows.shape
    cell, head = THUMB_PIXELS + GAP, 3 * LINE + 2 * GAP
    line = THUMB_PIXELS + 2 * LINE + GAP
    sheet, draw = _paper((negatives + 2) * cell + 3 * GAP, head + count * line + GAP)
    step, font = message["step"], _font()
    draw.text((GAP, GAP), f"step {step}: queries, their keys, and the {negatives} queued keys most like each query", INK, font)
    draw.text((GAP, GAP + LINE), "under each: cosine similarity, and age of the queued key in steps. Negatives are shown whole. Red: nearer than the", FAINT, font)
    draw.text((GAP, GAP + 2 * LINE), f"query's own key, or of the query's own image. exp(similarity / {temperature:g}) is the weight in the loss.", FAINT, font)
    for q in range(count):
        y = head + q * line
        for view, (pixels, words) in enumerate(zip(message["views"][q], ("query", f"key {message['positive'][q]:+.2f}"), strict=True)):
            x = GAP + view * cell
            sheet.paste(_square(Image.fromarray(pixels)), (x, y))
            draw.rectangle((x - 1, y - 1, x + THUMB_PIXELS, y + THUMB_PIXELS), outline=QUERY, width=2)
            draw.text((x, y + THUMB_PIXELS + 2), words, INK, font)
        for n, row in enumerate(rows[q].tolist()):
            x, similarity = 3 * GAP + (n + 2) * cell, float(message["similarity"][q, n])
            own = row != UNKNOWN and row == int(message["rows"][q])
            old = step - 1 - int(message["made"][q, n])
            age = f"{old} step{'s' if old > 1 else ''}" if message["made"][q, n] >= 0 else "noise"
            _thumb(sheet, draw, (x, y), thumbs.get(row), "no image yet" if row == UNKNOWN else "unreadable")
            colour = ALARM if own or similarity > message["positive"][q] else INK
            draw.text((x, y + THUMB_PIXELS + 2), f"{similarity:+.2f}  {age}", colour, font)
            if own:
                draw.text((x, y + THUMB_PIXELS + LINE), "own image", ALARM, font)
    return sheet


def _thumb(sheet: Image.Image, draw: ImageDraw.ImageDraw, place: tuple[int, int], image: Image.Image | None, without: str) -> None:
    x, y = place
    if image is None:
        draw.rectangle((x, y, x + THUMB_PIXELS - 1, y + THUMB_PIXELS - 1), fill="#eeeeee")
        draw.text((x + 6, y + THUMB_PIXELS // 2 - 6), without, FAINT, _font())
    else:
        sheet.paste(image, place)


def _square(image: Image.Image) -> Image.Image:
    """The whole image in THUMB_PIXELS, small ones enlarged pixel by pixel, on gray."""
    scale = THUMB_PIXELS / max(image.size)
    size = tuple(max(1, round(side * scale)) for side in image.size)
    small = image.resize(size, Image.Resampling.NEAREST if scale > 1 else Image.Resampling.BOX)
    framed = Image.new("RGB", (THUMB_PIXELS, THUMB_PIXELS), "#eeeeee")
    framed.paste(small, tuple((THUMB_PIXELS - side) // 2 for side in size))
    return framed


def _paper(width: int, height: int) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    sheet = Image.new("RGB", (width, height), PAPER)
    return sheet, ImageDraw.Draw(sheet)


@lru_cache(maxsize=1)
def _font() -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(FONT_PIXELS)


def _jpeg(image: Image.Image) -> tuple[bytes, int, int]:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=JPEG_QUALITY)
    return buffer.getvalue(), image.height, image.width
