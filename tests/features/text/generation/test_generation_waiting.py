"""The time of a prompt in the queue."""

import asyncio
from pathlib import Path

from features.text.generation.helpers import generation, load_model


async def test_the_time_in_the_queue_is_reported(llama_folder: Path) -> None:
    model = load_model(llama_folder, max_batch=1)
    try:
        first, second = await asyncio.gather(
            generation(model, "The import", max_new_tokens=40, ignore_eos=True),
            generation(model, "A class", max_new_tokens=1),
        )
        waits = [result.prompts[0].waited_s or 0.0 for result in (first, second)]
        assert 0 <= waits[0] < waits[1]
    finally:
        await model.close()
