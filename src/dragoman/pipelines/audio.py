"""Audio files as samples of one channel at the rate of a model: WAV by itself, other formats by ffmpeg."""

import math
import shutil
import struct
from typing import Any

import numpy as np

from dragoman.core.datatypes import Array
from dragoman.core.errors import InvalidInput, NotSupported

# How files of audio begin. ffmpeg opens other files that a playlist names.
_SIGNATURES = (b"RIFF", b"fLaC", b"OggS", b"ID3", b"\xff\xfb", b"\xff\xf3", b"\xff\xf2")
_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_RATES = (1000, 384_000)  # Hz
_MAX_SAMPLES = 1 << 26  # 70 minutes at 16 kHz, 256 MiB
# The filter of torchaudio's resampling: a sinc of 6 zero crossings with a Hann window, up to 0.99 of half the rate.
_CROSSINGS, _ROLLOFF = 6, 0.99
_CHUNK = 1 << 14  # output samples


def is_audio(content: bytes) -> bool:
    """Return whether a file begins as a WAV, FLAC, Ogg or MP3 file does."""
    return content.startswith(_SIGNATURES)


def read_audio(content: bytes, rate: int, where: str) -> Array:
    """Return the samples of a file, FP32 [samples] from -1 to 1, at `rate` in Hz.

    Raises InvalidInput for a file that is not audio or is damaged, and NotSupported for other files than WAV if ffmpeg
    is not installed. `where` names the input in errors.
    """
    if content[:4] == b"RIFF" and content[8:12] == b"WAVE":
        samples, given = read_wav(content, where)
        return resample(samples, given, rate, where)
    if not is_audio(content):
        raise InvalidInput(f"{where}: expected a WAV, FLAC, Ogg or MP3 file as bytes or base64, got {content[:40]!r}")
    if shutil.which("ffmpeg") is None:
        raise NotSupported(f"{where}: files other than WAV need the program ffmpeg on the server; send a WAV file")
    from transformers.pipelines.audio_utils import ffmpeg_read

    try:
        found: Array = ffmpeg_read(content, rate)
    except ValueError as error:
        raise InvalidInput(f"{where}: ffmpeg cannot read the audio: {error}") from error
    return found


def resample(samples: Array, rate: int, wanted: int, where: str) -> Array:
    """Return samples at another rate by windowed sinc interpolation. Raises InvalidInput for rates out of range."""
    low, high = _RATES
    if not low <= rate <= high:
        raise InvalidInput(f"{where}: expected a sampling rate from {low} to {high} Hz, got {rate}")
    count = math.ceil(len(samples) * wanted / rate)
    if count > _MAX_SAMPLES:
        raise InvalidInput(f"{where}: expected at most {_MAX_SAMPLES} samples at {wanted} Hz, got {count}")
    if rate == wanted:
        return np.asarray(samples, np.float32)
    scale = min(rate, wanted) * _ROLLOFF / rate  # of the sinc, in input samples
    width = math.ceil(_CROSSINGS / scale)
    padded = np.pad(samples.astype(np.float64), width)
    result = np.empty(count, np.float32)
    for start in range(0, count, _CHUNK):
        position = np.arange(start, min(start + _CHUNK, count)) * (rate / wanted)
        nearest = np.floor(position).astype(np.int64)
        taps = nearest[:, None] + np.arange(-width + 1, width + 1)
        distance = np.clip((taps - position[:, None]) * scale, -_CROSSINGS, _CROSSINGS)
        weights = np.sinc(distance) * np.cos(distance * (np.pi / 2 / _CROSSINGS)) ** 2 * scale
        inside = np.clip(taps + width, 0, len(padded) - 1)
        result[start : start + len(position)] = (padded[inside] * weights).sum(1)
    return result


def read_wav(content: bytes, where: str) -> tuple[Array, int]:
    """Return the samples of a WAV file, FP32 [samples] from -1 to 1, and their rate in Hz.

    Raises InvalidInput for another file, or one that is damaged. `where` names the input in errors.
    """
    if content[:4] != b"RIFF" or content[8:12] != b"WAVE":
        raise InvalidInput(f"{where}: expected a WAV file, got {content[:12]!r}")
    try:
        return _read_wav(content)
    except (struct.error, ValueError) as error:
        raise InvalidInput(f"{where}: expected a WAV file: {error}") from error


def _read_wav(content: bytes) -> tuple[Array, int]:
    """Return samples of one channel and the rate. Raises ValueError or struct.error for a damaged file."""
    form: Any = None
    at = 12
    while at + 8 <= len(content):
        name, size = content[at : at + 4], struct.unpack_from("<I", content, at + 4)[0]
        start = at + 8
        if name == b"fmt ":
            form = struct.unpack_from("<HHIIHH", content, start)
            if form[0] == _EXTENSIBLE and size >= 26:
                form = (struct.unpack_from("<H", content, start + 24)[0], *form[1:])
        elif name == b"data" and form is not None:
            return _samples(content[start : start + size], form), form[2]
        at = start + size + size % 2
    raise ValueError("no 'fmt ' and 'data' chunks found")


def _samples(data: bytes, form: tuple[int, ...]) -> Array:
    """Return the mean of the channels."""
    kind, channels, _, _, _, bits = form
    width = bits // 8
    if not channels or (kind, bits) not in {(_PCM, n) for n in (8, 16, 24, 32)} | {(_FLOAT, 32), (_FLOAT, 64)}:
        raise ValueError(f"expected PCM of 8, 16, 24 or 32 bits or floats, got format {kind} of {bits} bits")
    values: Array
    data = data[: len(data) - len(data) % (width * channels)]
    if kind == _FLOAT:
        values = np.frombuffer(data, f"<f{width}").astype(np.float32)
        if not np.isfinite(values).all():
            raise ValueError("expected finite samples")
    elif bits == 8:  # the only unsigned one
        values = (np.frombuffer(data, np.uint8).astype(np.float32) - 128) / 128
    elif bits == 24:
        triples = np.frombuffer(data, np.uint8).reshape(-1, 3)
        whole = np.zeros((len(triples), 4), np.uint8)
        whole[:, 1:] = triples
        values = whole.view("<i4")[:, 0].astype(np.float64) / 2**31
    else:
        values = np.frombuffer(data, f"<i{width}").astype(np.float64) / 2 ** (bits - 1)
    frames = values.reshape(-1, channels)
    if not len(frames):
        raise ValueError("expected samples, got none")
    mono: Array = frames.mean(1).astype(np.float32)
    return mono
