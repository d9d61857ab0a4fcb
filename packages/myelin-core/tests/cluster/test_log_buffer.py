"""What is kept of a node's output."""

from __future__ import annotations

import asyncio

from myelin.cluster.log_buffer import MAX_LINE_CHARACTERS
from myelin.plugin import LogBuffer, LogLine


async def test_followers_see_what_is_kept_then_what_comes() -> None:
    log = LogBuffer(keep=3)
    for number in range(5):
        log.append(LogLine("stdout", str(number), 0.0))
    seen: list[str] = []

    async def follow() -> None:
        async for line in log.follow():
            seen.append(line.text)  # noqa: PERF401 - seen as it comes, which is what is tested

    following = asyncio.create_task(follow())
    await asyncio.sleep(0)
    assert seen == ["(2 lines were dropped)", "2", "3", "4"]
    for number in range(5, 10):  # faster than the follower can read
        log.append(LogLine("stderr", str(number), 0.0))
    log.end()
    await following
    assert seen[4:] == ["(2 lines were dropped)", "7", "8", "9"]
    assert (log.last("stderr"), log.last("stdout")) == ("9", "")
    assert [line.text async for line in log.follow()] == ["(7 lines were dropped)", "7", "8", "9"]


async def test_a_line_is_kept_to_a_bounded_length() -> None:
    log = LogBuffer()
    log.append(LogLine("stdout", "x" * (MAX_LINE_CHARACTERS + 1), 0.0))
    log.end()
    assert [len(line.text) async for line in log.follow()] == [MAX_LINE_CHARACTERS]
