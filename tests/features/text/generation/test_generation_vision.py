"""Vision-language models: texts equal to those of transformers with the same pixels, and limits of images."""

import asyncio
import base64
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

import vision_models
from dragoman.core.calls import Tokenize
from dragoman.core.errors import DeadlineExceeded, InvalidInput, ModelFailed
from dragoman.core.text import Chat
from dragoman.runtimes.recognise import recognise
from dragoman_text.generation.cache import CacheManager, CacheShape
from dragoman_text.generation.general import GeneralRunner
from dragoman_text.generation.job import Sequence
from dragoman_text.generation.vision import load_processor
from dragoman_text.runtimes.llm.model import LanguageModel
from features.text.generation.helpers import generation, ids, load_model, text, text_engine
from features.text.generation.test_generation_templates import ENDLESS
from vision_models import VisionReference, file_of, image

pytestmark = pytest.mark.filterwarnings("ignore")
NEW = 6


def chat(*parts: Any, **options: Any) -> Chat:
    """Return a chat of texts and files of images."""
    content = [part if isinstance(part, dict) else {"type": "text", "text": part} for part in parts]
    return Chat(({"role": "user", "content": content},), **options)


def part(picture: Any, file_format: str = "PNG", **options: Any) -> dict[str, Any]:
    return {"type": "image", "base64": file_of(picture, file_format, **options)}


def expected(reference: VisionReference, prompt: Chat, pictures: list[Any]) -> tuple[int, list[int]]:
    """Return the number of prompt tokens and the completion of transformers."""
    plain = [{"type": "image"} if each["type"] == "image" else each for each in prompt.messages[0]["content"]]
    return reference.generate([{"role": "user", "content": plain}], pictures, NEW)


@pytest.mark.parametrize("kind", vision_models.KINDS)
async def test_completions_equal_transformers_alone_and_in_a_crowd(kind: str, tmp_path: Path) -> None:
    folder = vision_models.save_model(tmp_path, kind)
    assert recognise(folder) == "llm"
    pictures = [[image(0)], [image(1, 90, 40)], [image(2), image(3, 30, 60)], []]
    prompts = [chat("look ", *map(part, each), f"at {len(each)}") for each in pictures]
    model = load_model(folder)
    reference = VisionReference(folder, load_processor(folder))
    try:
        wanted = [expected(reference, *each) for each in zip(prompts, pictures, strict=True)]
        assert len({tuple(tokens) for _, tokens in wanted}) > 1
        alone = [await generation(model, prompt, max_new_tokens=NEW, ignore_eos=True) for prompt in prompts]
        both = [generation(model, prompt, max_new_tokens=NEW, ignore_eos=True) for prompt in prompts * 2]
        for (count, tokens), result in zip(wanted * 3, [*alone, *await asyncio.gather(*both)], strict=True):
            assert (result.prompts[0].tokens, ids(result.texts[0])) == (count, tokens)
        assert model.details()["forward"] == "cache"
        assert model.details()["vision"] is True
    finally:
        await model.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision_models.save_model(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def llava(folder: Path) -> Iterator[LanguageModel]:
    options = {"max_images": 2, "max_image_pixels": 5000, "max_image_bytes": 20_000, "max_batch": 4}
    model = load_model(folder, **options)
    yield model
    asyncio.run(model.close())


@pytest.fixture(scope="module")
def reference(folder: Path) -> VisionReference:
    return VisionReference(folder, load_processor(folder))


async def completion(model: LanguageModel, prompt: Chat, **options: Any) -> list[int]:
    return ids(await text(model, prompt, max_new_tokens=NEW, ignore_eos=True, **options))


async def test_equal_texts_with_different_images(llava: LanguageModel, reference: VisionReference) -> None:
    pictures = [image(seed) for seed in range(4)]
    completions = [await completion(llava, chat("same ", part(each))) for each in pictures]
    assert completions == [expected(reference, chat("same ", part(each)), [each])[1] for each in pictures]
    assert len(set(map(tuple, completions))) > 1


def test_prompts_with_images_do_not_use_the_prefix_cache() -> None:
    """Their tokens are equal where the images differ."""
    memory = CacheManager(CacheShape(1, 1, 4, 4), 1024, 1024, torch.float32, torch.device("cpu"), clears=False)
    memory.reserve(1, 256)
    tokens = [7] * 100
    for features, found in (({"pixel_values": torch.ones(1)}, False), ({}, True)):
        first = Sequence(list(tokens), 100, "", 0, 100, features=features)
        memory.store_prefix(first)
        for other, loads in (({}, found), ({"pixel_values": torch.zeros(1)}, False)):
            assert (memory.load_prefix(Sequence(list(tokens), 100, "", 0, features=other)) > 0) is loads


async def test_several_completions_and_beams(llava: LanguageModel, reference: VisionReference) -> None:
    picture = image(4)
    prompt = chat("look ", part(picture))
    greedy = expected(reference, prompt, [picture])[1]
    result = await generation(llava, prompt, n=2, max_new_tokens=NEW, ignore_eos=True)
    assert [ids(each) for each in result.texts] == [greedy] * 2
    beams = await generation(llava, prompt, num_beams=2, max_new_tokens=NEW, ignore_eos=True)
    length, _ = expected(reference, prompt, [picture])
    assert len(ids(beams.texts[0])) == NEW
    assert beams.prompts[0].tokens == length


async def test_sequences_with_images_are_computed_again_after_preemption(
    folder: Path, reference: VisionReference
) -> None:
    model = load_model(folder, cache_memory=130 / 1024**2, max_context=120)
    try:
        pictures = [image(seed) for seed in range(6)]
        prompts = [chat(f"look {'x' * 40}", part(picture)) for picture in pictures]
        results = await asyncio.gather(*(text(model, p, max_new_tokens=40, ignore_eos=True) for p in prompts))
        assert text_engine(model).engine.scheduler.preempted > 0
        for prompt, picture, result in zip(prompts, pictures, results, strict=True):
            assert ids(result)[:NEW] == expected(reference, prompt, [picture])[1]
    finally:
        await model.close()


async def first_logprob(model: LanguageModel, prompt: Chat) -> float:
    return (await text(model, prompt, max_new_tokens=1, ignore_eos=True)).tokens[0].logprob or 0.0


async def test_formats_and_orientation(llava: LanguageModel) -> None:
    picture = image(5)
    plain = await first_logprob(llava, chat("a ", part(picture)))
    assert await first_logprob(llava, chat("a ", part(picture, "WEBP", lossless=True))) == plain
    for file_format in ("BMP", "TIFF", "PPM"):
        assert await first_logprob(llava, chat("a ", part(picture, file_format))) == plain
    with_alpha = picture.copy()
    with_alpha.putalpha(255)
    assert await first_logprob(llava, chat("a ", part(with_alpha))) == plain
    with_alpha.putalpha(0)
    white = await first_logprob(llava, chat("a ", part(picture.point(lambda _: 255))))
    assert await first_logprob(llava, chat("a ", part(with_alpha))) == white != plain
    turned, exif = picture.transpose(2), picture.getexif()  # by 90 degrees
    exif[0x0112] = 6  # "turn it by 90 degrees clockwise to view it"
    assert await first_logprob(llava, chat("a ", part(turned, "PNG", exif=exif))) == plain
    assert await first_logprob(llava, chat("a ", part(turned))) != plain
    for file_format in ("JPEG", "GIF"):
        assert len(await completion(llava, chat("a ", part(picture, file_format)))) == NEW


def bomb() -> str:
    """Return a PNG of few bytes that says that it has 60,000 x 60,000 pixels."""
    header = b"IHDR" + (60_000).to_bytes(4, "big") * 2 + bytes([8, 2, 0, 0, 0])
    chunks = [header, b"IDAT" + zlib.compress(bytes(100)), b"IEND"]
    data = b"".join((len(c) - 4).to_bytes(4, "big") + c + zlib.crc32(c).to_bytes(4, "big") for c in chunks)
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + data).decode()


def jpeg_of_scans(scans: int) -> str:
    """Return a progressive JPEG with this number of scans, of a few bytes each for all pixels."""

    def segment(marker: int, data: bytes) -> bytes:
        return bytes((255, marker)) + (len(data) + 2).to_bytes(2, "big") + data

    start = b"\xff\xd8" + segment(0xDB, b"\0" + bytes([1] * 64))
    frame = segment(0xC2, bytes((8, 0, 64, 0, 64, 1, 1, 0x11, 0)))  # 64 x 64 pixels
    tables = segment(0xC4, b"\0\1" + bytes(16)) + segment(0xC4, bytes((0x10, 1, 1, *[0] * 14, 0xE0, 0)))
    first = segment(0xDA, bytes((1, 1, 0, 0, 0, 0))) + bytes(8)
    others = (segment(0xDA, bytes((1, 1, 0, k % 63 + 1, k % 63 + 1, 0))) + b"\x7f\xfe" for k in range(scans - 1))
    return base64.b64encode(start + frame + tables + first + b"".join(others) + b"\xff\xd9").decode()


def broken_exif() -> str:
    """Return a JPEG to turn, of which other EXIF data cannot be written again."""
    picture = image(0)
    exif = picture.getexif()
    exif[0x0112], exif[0x0100] = 6, 7
    file = bytearray(base64.b64decode(file_of(picture, "JPEG", exif=exif)))
    file[file.index(b"\x01\x00\x00\x04") + 3] = 2  # 7 is a text
    return base64.b64encode(file).decode()


def raw(data: str) -> dict[str, Any]:
    return {"type": "image", "base64": data}


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([part(image(0, 4, 4))] * 3, "images: expected at most 2 .max_images., got 3"),
        ([part(image(0, 100, 60))], "images.0.: expected at most 5000 pixels in all .max_image_pixels., got 100 x 60"),
        ([part(image(0, 60, 50))] * 2, "images.1.: expected at most 5000 pixels in all"),
        ([raw(bomb())], "expected at most 5000 pixels in all .max_image_pixels."),
        ([raw("A" * 40_000)], "images: expected at most 20000 bytes .max_image_bytes., got 30000"),
        ([raw("no!")], "images.0.: expected base64"),
        ([raw("aGVsbG8=")], "images.0.: expected an image .PNG, JPEG, WEBP, GIF, BMP, TIFF, PPM."),
        ([raw(file_of(image(0))[:600])], "images.0.: expected an image"),
        ([part(image(0), "ICO")], "images.0.: expected an image"),
        ([part(image(0).convert("L").convert("I").convert("I;16"))], "expected 8 bits for each channel, got .* I;16"),
        ([part(image(0, 1, 201))], "images.0.: expected sides in a ratio of at most 200, got 1 x 201"),
        ([raw(jpeg_of_scans(101))], "images.0.: expected a JPEG of at most 100 scans, got 101"),
        ([raw(broken_exif())], "images.0.: expected an image .PNG, JPEG, .* PPM.: required argument"),
        ([part(image(0)), "an <image> here"], "expected no '<image>' in texts beside images"),
    ],
)
async def test_invalid_images(llava: LanguageModel, parts: list[Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        await text(llava, chat(*parts))


def test_quantization_of_a_model_with_vision_is_rejected(folder: Path) -> None:
    with pytest.raises(
        ModelFailed, match="parameter 'quantization': 'int8' is not possible: expected a model type of llama, "
    ):
        load_model(folder, quantization="int8")


async def test_a_truncated_prompt_would_lose_images(llava: LanguageModel) -> None:
    with pytest.raises(InvalidInput, match="truncate: expected none for a prompt with images"):
        await text(llava, chat(part(image(0))), truncate=5)


async def test_templates_of_texts_alone_get_placeholders(llava: LanguageModel, tmp_path: Path) -> None:
    picture = image(1)
    model = load_model(vision_models.save_model(tmp_path, template=vision_models.PLAIN_TEMPLATE))
    try:
        prompt, texts = chat("look ", part(picture), "at it"), Chat(({"role": "user", "content": "hello"},))
        wanted = await first_logprob(llava, prompt)
        assert await first_logprob(model, prompt) == wanted
        own = replace(prompt, template=vision_models.PLAIN_TEMPLATE)  # of the request
        assert await first_logprob(llava, own) == wanted
        assert await first_logprob(model, texts) == await first_logprob(llava, texts)
    finally:
        await model.close()


async def test_waiting_images_leave_threads_for_other_work(llava: LanguageModel) -> None:
    with text_engine(llava).intake.vocabulary.vision._lock:
        calls = [asyncio.create_task(completion(llava, chat("a ", part(image(0, 4, 4))))) for _ in range(40)]
        await asyncio.wait_for(asyncio.to_thread(int), 60)
    assert len({tuple(tokens) for tokens in await asyncio.gather(*calls)}) == 1


async def test_an_endless_template_of_a_request_leaves_the_queue_of_images(folder: Path) -> None:
    model = load_model(folder, prompt_s=2.0)
    try:
        prompt = chat("a ", part(image(0, 4, 4)))
        with pytest.raises(DeadlineExceeded, match="prompt_s"):
            await text(model, replace(prompt, template=ENDLESS))
        assert await completion(model, prompt)
    finally:
        await model.close()


@pytest.mark.parametrize("condition", ["true", "messages[0].content[1].text == 'a b c'"], ids=["probe", "sample"])
def test_an_endless_template_of_a_model_with_vision_ends_at_its_limit(condition: str, tmp_path: Path) -> None:
    shows = "{% for m in messages %}{% for part in m.content %}{{ part.text or '<image>' }}{% endfor %}{% endfor %}"
    template = f"{{% if {condition} %}}{ENDLESS}{{% endif %}}{shows}"
    with pytest.raises(ModelFailed, match=r"^chat template: .* within 1 s \(parameter 'prompt_s'\)"):
        load_model(vision_models.save_model(tmp_path, template=template), prompt_s=1.0)


async def test_tokens_of_a_prompt_with_images(llava: LanguageModel, reference: VisionReference) -> None:
    prompt = chat("look ", part(image(0)))
    tokenized = await llava.tokenize(Tokenize(prompt))
    assert len(tokenized.tokens) == expected(reference, prompt, [image(0)])[0]
    assert sum(token.text == "<image>" for token in tokenized.tokens) == 4


def test_a_model_whose_images_are_not_those_of_transformers_is_rejected(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments_of = GeneralRunner._arguments_of

    def without_images(self: GeneralRunner, features: Any, length: int) -> Any:
        arguments = arguments_of(self, features, length)
        if "pixel_values" in arguments:
            arguments["pixel_values"] = torch.randn_like(arguments["pixel_values"])
        return arguments

    monkeypatch.setattr(GeneralRunner, "_arguments_of", without_images)
    with pytest.raises(ModelFailed, match="its logits differ"):
        load_model(folder)


async def test_images_for_a_model_without_vision(llama: LanguageModel) -> None:
    with pytest.raises(InvalidInput, match=r"^`messages\[0\]\.content\[1\]` is an image: this model has no vision"):
        await text(llama, chat("look ", part(image(0))))
