"""Settings of models and of the server for custom code."""

import os
from collections.abc import Mapping
from typing import Any, Self

from dragoman_mlserver.mlserver.types import BaseModel, MetadataTensor


class ModelParameters(BaseModel):
    """`parameters` of a model-settings.json; any further field is accepted."""

    _allows_extra = True
    uri: str | None = None
    version: str | None = None
    environment_path: str | None = None
    environment_tarball: str | None = None
    inference_pool_gid: str | None = None
    autogenerate_inference_pool_gid: bool = False
    format: str | None = None
    content_type: str | None = None
    extra: dict[str, Any] | None = {}  # noqa: RUF012 - each object gets its own copy


class ModelSettings(BaseModel):
    """The content of a model-settings.json. `_source` is its path."""

    implementation: Any = None
    name: str = ""
    platform: str = ""
    versions: list[str] = []  # noqa: RUF012 - each object gets its own copy
    inputs: list[MetadataTensor] = []  # noqa: RUF012
    outputs: list[MetadataTensor] = []  # noqa: RUF012
    parallel_workers: int | None = None
    warm_workers: bool = False
    max_batch_size: int = 0
    max_batch_time: float = 0.0
    parameters: ModelParameters | None = None
    cache_enabled: bool = False
    _source: str | None = None

    @classmethod
    def from_fields(cls, given: Mapping[str, Any], source: str) -> Self:
        settings = cls(**given)
        settings._source = source
        return settings

    @classmethod
    def parse_file(cls, path: str | os.PathLike[str]) -> Self:
        """Return the settings in a file; a relative `uri` is relative to its folder."""
        settings = super().parse_file(path)
        settings._source = str(path)
        return settings

    @property
    def version(self) -> str | None:
        return self.parameters.version if self.parameters is not None else None

    @property
    def implementation_(self) -> Any:
        return self.implementation


class CORSSettings(BaseModel):
    """Settings of requests from pages of other origins."""

    allow_origins: list[str] | None = []  # noqa: RUF012 - each object gets its own copy
    allow_origin_regex: str | None = None
    allow_credentials: bool | None = False
    allow_methods: list[str] | None = ["GET"]  # noqa: RUF012
    allow_headers: list[str] | None = []  # noqa: RUF012
    expose_headers: list[str] | None = []  # noqa: RUF012
    max_age: int | None = 600


class Settings(BaseModel):
    """Settings of the server that custom code uses; any further field is accepted."""

    _allows_extra = True
    debug: bool = False
    parallel_workers: int = 1
    host: str = "127.0.0.1"
    http_port: int = 8080
    grpc_port: int = 8081
    metrics_endpoint: str | None = None
    cors_settings: CORSSettings | None = None
