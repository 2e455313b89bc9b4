"""The samples of a run's evaluations: texts that the model continued, and images that it classified.

Whatever is in them is text here: a model repeats what its data holds, secrets and control characters too.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any, Final, NamedTuple

from launch_train.common.masking import HIDDEN, INLINE, LIKE_SECRET
from launch_train.report.tables import table
from launch_train.runfolder.run import RunData
from launch_train.runfolder.starts import LARGEST_STEP, Record, is_number

KINDS: Final = ("text", "tokens", "images")
"""Of samples: texts, texts as the numbers of their tokens, images."""
MOST_EVALUATIONS: Final = 20
"""Evaluations whose samples are shown: the newest, and others spread over the run."""
MOST_SAMPLES: Final = 16
"""Most samples of an evaluation; the trainer writes no more."""
MOST_CHARACTERS: Final = 2000
MOST_PICTURE: Final = 20_000
"""Most characters of a picture in base64; the trainer's have at most 17,000."""

MOST_NAME: Final = 100

CONTROL_CATEGORIES: Final = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode categories of characters that control the text and are not visible themselves."""
KEPT_CONTROLS: Final = "\t\n\u00ad\u200c\u200d"
"""Characters of these categories that are kept: writing systems and emoji need them."""

PNG: Final = re.compile(r"iVBORw0KGgo[A-Za-z0-9+/]*={0,2}")
"""The signature of a PNG, in base64."""


class Prediction(NamedTuple):
    """What the model takes an image for, how sure it is (0 to 1; None: unknown), and what the image is."""

    predicted: str
    probability: float | None
    true: str

    @property
    def text(self) -> str:
        sure = "" if self.probability is None else f" {self.probability:.1%}"
        return f"{self.predicted}{sure}" + ("" if self.predicted == self.true else f" (true: {self.true})")


class Evaluation(NamedTuple):
    """The samples of the evaluation after a step: texts as (prompt, continuation), or images. `kind`: of KINDS.
    `pictures`: PNGs in base64, in the order of the images; an empty text: unknown."""

    step: int
    kind: str
    texts: tuple[tuple[str, str], ...] = ()
    images: tuple[Prediction, ...] = ()
    pictures: tuple[str, ...] = ()


def sample_events(run: RunData) -> dict[int, Record]:
    """Return the events with samples by step, in order, without steps that a later start repeated. Each has
    `thumbnails`, which the trainer writes once per start, because the images are always the same."""
    newest: dict[int, Record] = {}
    for start, last in run.starts_until():
        pictures: Any = ()
        for event in filter(_is_sample_event, start.events):
            pictures = event.get("thumbnails") or pictures
            if event["step"] <= last:
                newest[event["step"]] = {**event, "thumbnails": pictures}
    return dict(sorted(newest.items()))


def _is_sample_event(event: Record) -> bool:
    """Return whether an event is the trainer's; a script may log any event."""
    kind, step = event.get("kind"), event.get("step")
    return event["event"] == "samples" and kind in KINDS and type(step) is int and abs(step) < LARGEST_STEP


def evaluation(event: Record) -> Evaluation | None:
    """Return the samples of an event, without what is damaged; None if nothing is left."""
    samples = [sample for sample in _items(event, "samples") if isinstance(sample, Mapping)]
    if not _is_sample_event(event) or not samples:
        return None
    if event["kind"] == "images":
        predictions = list[Prediction]()
        for sample in samples:
            predicted, true = (harmless(_text(sample, key)[:MOST_NAME], "")[0] or "?" for key in ("predicted", "true"))
            share: Any = sample.get("probability")
            predictions.append(Prediction(predicted, float(share) if is_number(share) else None, true))
        pictures = tuple(
            item if isinstance(item, str) and len(item) <= MOST_PICTURE and PNG.fullmatch(item) else ""
            for item in _items(event, "thumbnails")
        )
        return Evaluation(event["step"], "images", (), tuple(predictions), pictures)
    texts = tuple(harmless(_text(sample, "prompt"), _text(sample, "text")) for sample in samples)
    return Evaluation(event["step"], event["kind"], texts)


def _items(event: Record, name: str) -> Sequence[Any]:
    items = event.get(name)
    return items[:MOST_SAMPLES] if isinstance(items, list) else ()


def _text(sample: Record, key: str) -> str:
    text = sample.get(key)
    return text[:MOST_CHARACTERS] if isinstance(text, str) else ""


# --- Text -----------------------------------------------------------------------------------------------------------


def harmless(first: str, then: str) -> tuple[str, str]:
    """Return two texts, of which the second continues the first, without what may be a secret, and with U+FFFD for each
    character that acts instead of being seen: controls other than tab and line feed, marks of the writing direction,
    halves of surrogate pairs."""
    cut = len(first)
    for begin, end in reversed([*_secrets(first + then)]):  # from the end, so that the places before stay right
        if end > cut:
            then = then[: max(begin - cut, 0)] + HIDDEN + then[end - cut :]
        if begin < cut:
            first = first[:begin] + HIDDEN + first[min(end, cut) :]
    return _visible(first), _visible(then)


def _secrets(text: str) -> Iterator[tuple[int, int]]:
    """Yield where the secrets of a text begin and end, in order and apart. A private key is all of the text."""
    if "PRIVATE KEY" in text:
        yield 0, len(text)
        return
    spans = [match.span(1)[1:] + match.span()[1:] for match in INLINE.finditer(text)]
    spans += [match.span() for match in re.finditer(r"\S+", text) if LIKE_SECRET.fullmatch(match[0])]
    last = 0
    for begin, end in sorted(spans):
        if end > last:
            yield max(begin, last), end
            last = end


def _visible(text: str) -> str:
    chars = text.replace("\r\n", "\n")
    return "".join(
        "\ufffd" if unicodedata.category(char) in CONTROL_CATEGORIES and char not in KEPT_CONTROLS else char
        for char in chars
    )


# --- HTML -----------------------------------------------------------------------------------------------------------


def section(run: RunData) -> str:
    """Return the section of a run's samples, the newest first; nothing if it has none."""
    events = [*sample_events(run).values()]
    spread = events
    if len(events) > MOST_EVALUATIONS:  # at equal distances, with the first and the last
        last, most = len(events) - 1, MOST_EVALUATIONS - 1
        spread = [events[round(number * last / most)] for number in range(MOST_EVALUATIONS)]
    evaluations = [samples for event in spread if (samples := evaluation(event))]
    if not evaluations:
        return ""
    *older, newest = evaluations
    about = ABOUT[newest.kind].format(f"{newest.step:,}")
    some = f" {len(evaluations)} of {len(events):,} evaluations are shown." if len(evaluations) < len(events) else ""
    if newest.images:
        shown = _pictures(newest)
        if older:  # a table: the images are the same in each evaluation
            most = max(len(evaluation.images) for evaluation in older)
            rows = [[f"{each.step:,}", *(image.text for image in each.images)] for each in reversed(older)]
            earlier = table(["step", *(f"image {number + 1}" for number in range(most))], rows)
            shown += f"<details><summary>earlier evaluations</summary>{earlier}</details>"
    else:
        shown = _texts(newest) + "".join(
            f"<details><summary>step {each.step:,}</summary>{_texts(each)}</details>" for each in reversed(older)
        )
    return f"<section><h2>Samples: {escape(run.id)}</h2><p>{about}{some}</p>{shown}</section>"


ABOUT: Final = {
    "text": "Held-out text (grey), and how the model continues it at step {}.",
    "tokens": "Numbers of held-out tokens (grey), and how the model continues them at step {}. The data has no "
    "tokenizer.",
    "images": "Held-out images, and what the model takes them for at step {}.",
}


def _texts(evaluation: Evaluation) -> str:
    return "".join(
        f"<pre class=sample dir=auto><span class=prompt>{escape(prompt)}</span>{escape(text)}</pre>"
        for prompt, text in evaluation.texts
    )


def _pictures(evaluation: Evaluation) -> str:
    items = []
    for number, prediction in enumerate(evaluation.images):
        picture = evaluation.pictures[number] if number < len(evaluation.pictures) else ""
        image = f'<img src="data:image/png;base64,{picture}" alt="image {number + 1}" width=64>' if picture else ""
        right = prediction.predicted == prediction.true
        sure = "" if prediction.probability is None else f" {prediction.probability:.1%}"
        words = f"{'✓' if right else '✗'} {prediction.predicted}{sure}"
        about = f"image {number + 1}" + ("" if right else f", true: {prediction.true}")
        shown = f"<span class={'right' if right else 'wrong'}>{escape(words)}</span><small>{escape(about)}</small>"
        items.append(f"<li>{image}{shown}")
    return f"<ol class=images>{''.join(items)}</ol>"
