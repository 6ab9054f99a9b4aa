"""How long a prompt waited before the engine looked at it is told with it."""

import asyncio
from pathlib import Path

from generation.house import generation, opened


async def test_who_waits_is_told_for_how_long(llama_folder: Path) -> None:
    model = opened(llama_folder, max_batch=1)
    try:
        first, second = await asyncio.gather(
            generation(model, "The import", max_new_tokens=40, ignore_eos=True),
            generation(model, "A class", max_new_tokens=1),
        )
        waits = [found.prompts[0].waited_s or 0.0 for found in (first, second)]
        assert 0 <= waits[0] < waits[1]
    finally:
        await model.close()
