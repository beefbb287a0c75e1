"""moco_ray: Momentum Contrast on Ray. The command line is `moco-ray`; from Python, `load_backbone` reads what it made."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moco_ray.backbone import load_backbone

__all__ = ["load_backbone"]


def __getattr__(name: str) -> Any:
    if name == "load_backbone":  # torch is imported when it is needed: the command's help is not to wait for it
        from moco_ray.backbone import load_backbone

        return load_backbone
    raise AttributeError(f"module 'moco_ray' has no attribute {name!r}")
