"""Which steps of the whole run a ring keeps, and what they add up to."""

from pathlib import Path

from ddpdoctor.recorder.storage import ring_layout, ring_reading
from ddpdoctor.recorder.storage.kept_steps import KeptSteps, is_sampled
from ddpdoctor.recorder.storage.ring_writing import Ring
from ddpdoctor.recorder.storage.step_parts import parts_of

INSIDE = (0,) * len(ring_layout.STEP_INSIDE)


def record(folder: Path, walls_us: list[int]) -> ring_reading.RingContent:
    ring = Ring(str(folder), ring_layout.ROLE_RANK, ring_layout.RANK_SHAPE, pid=42, start_ticks=7)
    for number, wall in enumerate(walls_us, start=1):
        ring.step(number, number, 0, ring_layout.STEP_OPTIMIZER, [wall, 0, 0, 0], [0] * 4, INSIDE)
    return ring_reading.read_ring_file(ring.path)


def test_a_short_run_is_kept_whole(tmp_path: Path) -> None:
    content = record(tmp_path, [1000] * 200)
    assert list(content.kept[0]) == list(range(1, 201))
    assert content.cells["sample_bits"] == 0


def test_a_long_run_keeps_an_even_sample_and_the_longest_steps(tmp_path: Path) -> None:
    walls = [50_000 if number % 500 == 499 else 1000 for number in range(1, 20_001)]
    content = record(tmp_path, walls)
    kept, bits = set(content.kept[0]), content.cells["sample_bits"]
    assert {number for number in range(1, 20_001) if is_sampled(number, bits)} <= kept
    assert set(range(499, 20_000, 500)) <= kept
    assert len(kept) <= ring_layout.SAMPLED_STEPS + ring_layout.LONGEST_STEPS


def test_a_sample_has_its_share_of_steps_that_come_back_regularly() -> None:
    for period in (2, 3, 4, 8, 10, 64, 100):
        for offset in (0, 1):
            sampled = [number for number in range(1, 64_001) if is_sampled(number, 6)]
            found = sum(number % period == offset for number in sampled)
            assert abs(found - len(sampled) / period) <= max(3, 0.2 * len(sampled) / period), (period, offset)


def test_places_are_never_used_by_two_steps_of_the_sample() -> None:
    kept = KeptSteps()
    held: dict[int, int] = {}
    for number in range(1, 10_001):
        for place in kept.places(number, 1):
            if place < ring_layout.SAMPLED_STEPS:
                held[place] = number
    sampled = {number for number in range(1, 10_001) if is_sampled(number, kept.bits)}
    assert sampled <= set(held.values())


def test_totals_are_those_of_the_whole_run_and_begin_anew_with_the_numbers(tmp_path: Path) -> None:
    ring = Ring(str(tmp_path), ring_layout.ROLE_RANK, ring_layout.RANK_SHAPE, pid=42, start_ticks=7)
    for number in (1, 2, 3, 1, 2):
        ring.step(number, number, 0, ring_layout.STEP_OPTIMIZER, [3000, 1000, 0, 0], [0] * 4, INSIDE)
    content = ring_reading.read_ring_file(ring.path)
    totals = dict(zip(ring_layout.PARTS, content.totals, strict=True))
    assert (totals["host"][0], totals["forward"][0], totals["wall"][0]) == (6000, 2000, 8000)
    assert totals["host"][1:][(3000).bit_length()] == 2
    assert sum(totals["data"][1:]) == 2
    assert list(content.kept[0]) == [1, 2]


def test_a_sum_beyond_32_bits_is_kept(tmp_path: Path) -> None:
    content = record(tmp_path, [2**32 - 1] * 3)
    assert dict(zip(ring_layout.PARTS, content.totals, strict=True))["wall"][0] == 3 * (2**32 - 1)


def test_the_parts_of_a_step_add_up_to_it() -> None:
    inside = dict.fromkeys(ring_layout.STEP_INSIDE, 0)
    inside.update(data_us=10, buffers_us=5, exposed_us=40, optimizer_us=7, own_us=3)
    waits = [20, 5 + 1, 0, 40]
    for flags in (0, ring_layout.STEP_WAIT_UNKNOWN):
        parts = dict(
            zip(ring_layout.PARTS, parts_of([100, 50, 8, 90], waits, tuple(inside.values()), flags), strict=True)
        )
        assert parts["calls"] == 21
        assert parts["host"] == 100 - 20 - 10 - 7
        assert sum(value for part, value in parts.items() if part not in ("gc", "wall")) == parts["wall"] == 251
        assert parts["unsplit" if flags else "backward"] == 50
