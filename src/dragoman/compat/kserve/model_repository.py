"""Models by name, for scripts that register them."""

from dragoman.compat.kserve.model import BaseKServeModel

MODEL_MOUNT_DIRS = "/mnt/models"


class ModelRepository:
    """The models that a script registers; loading at run time is done by the server's own repository."""

    def __init__(self, models_dir: str = MODEL_MOUNT_DIRS) -> None:
        self.models: dict[str, BaseKServeModel] = {}
        self.models_dir = models_dir

    def get_model(self, name: str) -> BaseKServeModel | None:
        return self.models.get(name)

    def get_models(self) -> dict[str, BaseKServeModel]:
        return self.models

    async def is_model_ready(self, name: str) -> bool:
        model = self.get_model(name)
        return model is not None and await model.healthy()

    def update(self, model: BaseKServeModel, name: str | None = None) -> None:
        self.models[name or model.name] = model

    def unload(self, name: str) -> None:
        """Stop a model and forget it. Raises KeyError."""
        if name not in self.models:
            raise KeyError(f"model with name {name} does not exist")
        self.models.pop(name).stop()
