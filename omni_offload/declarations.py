"""What is known by name: classes whose blocks are known, and the roles that names usually have. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .plan import OffloadPlan

# Class name of a transformer or text encoder -> dotted paths of its lists of blocks, in the order in which they run.
# A class may say so itself in `_layerwise_offload_blocks_attrs`, and a pipeline in its `_offload_plan`; both win.
BLOCK_LISTS: Mapping[str, tuple[str, ...]] = {
    "ChronoEditTransformer3DModel": ("blocks",),
    "HunyuanDiT2DModel": ("blocks",),
    "Lumina2Transformer2DModel": ("context_refiner", "noise_refiner", "layers"),
    "ZImageTransformer2DModel": ("noise_refiner", "context_refiner", "siglip_refiner", "layers"),
    "Flux2Transformer2DModel": ("transformer_blocks", "single_transformer_blocks"),
    "FluxTransformer2DModel": ("transformer_blocks", "single_transformer_blocks"),
    "WanTransformer3DModel": ("blocks",),
    "WanVACETransformer3DModel": ("vace_blocks", "blocks"),
    "CLIPTextModel": ("text_model.encoder.layers",),
    "Mistral3ForConditionalGeneration": ("model.vision_tower.transformer.layers", "model.language_model.layers"),
    "Qwen3ForCausalLM": ("model.layers",),
    "T5EncoderModel": ("encoder.block",),
    "UMT5EncoderModel": ("encoder.block",),
}

# Class name -> modules inside a block, deeper than its children, that the model calls from outside of that block.
OUTSIDE_CALLS: Mapping[str, tuple[str, ...]] = {
    "DiTTransformer2DModel": ("transformer_blocks.0.norm1.emb",),
    "Transformer2DModel": ("transformer_blocks.0.norm1.emb",),
}

_TEXT = OffloadPlan(encoder_component_types={"text_encoder": "text_encoder"})
_TEXT_AND_IMAGE = OffloadPlan(
    encoder_component_types={"text_encoder": "text_encoder", "image_encoder": "image_encoder"}
)
_ONE_DIT = {
    "_dit_modules": ("transformer",),
    "_encoder_modules": ("text_encoder",),
    "_vae_modules": ("vae",),
    "_offload_plan": _TEXT,
}

# Class name of a pipeline -> the class attributes that it would declare, for Diffusers' classes that we know. A class
# that declares any of the lists itself stands for itself.
PIPELINES: Mapping[str, Mapping[str, Any]] = {
    "Flux2KleinPipeline": _ONE_DIT,
    "Flux2Pipeline": _ONE_DIT,
    "WanImageToVideoPipeline": {
        "_dit_modules": ("transformer", "transformer_2"),
        "_encoder_modules": ("text_encoder", "image_encoder"),
        "_vae_modules": ("vae",),
        "_offload_plan": _TEXT_AND_IMAGE,
    },
    "WanPipeline": {
        "_dit_modules": ("transformer", "transformer_2"),
        "_encoder_modules": ("text_encoder",),
        "_vae_modules": ("vae",),
        "_offload_plan": _TEXT,
    },
}

# Component names whose role is beyond doubt; digits behind the name do not change it, nor words before it.
ROLE_OF_NAME: Mapping[str, str] = {
    "transformer": "dit",
    "unet": "dit",
    "dit": "dit",
    "denoiser": "dit",
    "prior": "dit",
    "text_encoder": "text_encoder",
    "text_model": "text_encoder",
    "language_model": "text_encoder",
    "vision_language_encoder": "text_encoder",
    "prompt_enhancer": "text_encoder",
    "prompt_upsampler": "text_encoder",
    "image_encoder": "image_encoder",
    "vision_encoder": "image_encoder",
    "controlnet": "controlnet",
    "vae": "vae",
    "vqvae": "vae",
    "vqgan": "vae",
    "movq": "vae",
    "autoencoder": "vae",
    # What runs once, behind everything else or beside it, and is small.
    "safety_checker": "resident",
    "motion_adapter": "resident",
    "vocoder": "resident",
}

# For any other name the class decides: the first pattern that its name matches.
ROLE_OF_CLASS: Mapping[str, str] = {
    "controlnet": r"ControlNet",
    "resident": r"Adapter|SafetyChecker|Vocoder|Watermark",
    "dit": r"Transformer\w*Model$|UNet|DiT|^PriorTransformer$|DiffNeXt$|Prior$",
    "vae": r"Autoencoder|VQModel|VAE",
    "image_encoder": r"Vision|Image\w*Encoder",
    "text_encoder": r"Text\w*Model|ForCausalLM|EncoderModel|ForConditionalGeneration",
}

# Class name of a parameter -> why its weights cannot come and go.
UNSERVED_WEIGHTS: Mapping[str, str] = {
    "Int8Params": "its layer moves data and scales into a state of its own at the first call",
    "DTensor": "a share of it is on each device",
}

# Methods of a component that would put another offloading beside ours.
REFUSED = ("enable_group_offload",)

# Calls, on a pipeline or a component, that edit weights in ways that no version counter shows.
MUTATORS = (
    "add_adapter",
    "delete_adapters",
    "disable_adapters",
    "disable_lora",
    "enable_adapters",
    "enable_layerwise_casting",
    "enable_lora",
    "enable_lora_hotswap",
    "fuse_lora",
    "fuse_qkv_projections",
    "load_ip_adapter",
    "load_lora_adapter",
    "load_lora_weights",
    "load_textual_inversion",
    "resize_token_embeddings",
    "set_adapter",
    "set_adapters",
    "set_lora_device",
    "unfuse_lora",
    "unfuse_qkv_projections",
    "unload_ip_adapter",
    "unload_lora",
    "unload_lora_weights",
    "unload_textual_inversion",
)
