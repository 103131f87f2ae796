"""A small transformer in two parts, of Cosmos3's kind, and the pipeline around it.

A reasoner stack reads the text once per generation and hands on its keys and values; a generator stack runs
at every denoising step and attends to them. Each part can be offloaded on its own.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.image_processor import VaeImageProcessor
from diffusers.models.embeddings import TimestepEmbedding, Timesteps
from diffusers.models.modeling_utils import ModelMixin
from diffusers.models.normalization import RMSNorm
from diffusers.pipelines.pipeline_utils import DiffusionPipeline, ImagePipelineOutput
from diffusers.utils.torch_utils import randn_tensor
from torch import nn

from ..policies.split import SplitOffloadMixin

KeyValue = tuple[torch.Tensor, torch.Tensor]


def _rotary(length: int, width: int, device: torch.device) -> KeyValue:
    """Cosines and sines, each of shape (length, width), in float32."""
    frequencies = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float32, device=device) / width)
    angles = torch.outer(torch.arange(length, dtype=torch.float32, device=device), frequencies)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def _rotate(x: torch.Tensor, rotary: KeyValue) -> torch.Tensor:
    cos, sin = rotary
    first, second = x.float().chunk(2, dim=-1)
    return (x.float() * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)


class SmallSplitAttention(nn.Module):
    """Grouped-query attention over the own tokens, preceded by another stack's keys and values if given."""

    def __init__(self, hidden_size: int, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        self.head_width = hidden_size // num_heads
        self.to_q = nn.Linear(hidden_size, hidden_size, bias=False)
        self.to_k = nn.Linear(hidden_size, num_kv_heads * self.head_width, bias=False)
        self.to_v = nn.Linear(hidden_size, num_kv_heads * self.head_width, bias=False)
        self.to_out = nn.Linear(hidden_size, hidden_size, bias=False)
        self.norm_q = RMSNorm(self.head_width, eps=1e-6)
        self.norm_k = RMSNorm(self.head_width, eps=1e-6)

    def forward(
        self, x: torch.Tensor, rotary: KeyValue, memory: KeyValue | None = None, causal: bool = False
    ) -> tuple[torch.Tensor, KeyValue]:
        """`x`: (batch, tokens, hidden). Returns the output and this layer's own keys and values."""
        query, key, value = (
            layer(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for layer in (self.to_q, self.to_k, self.to_v)
        )
        query, key = _rotate(self.norm_q(query), rotary), _rotate(self.norm_k(key), rotary)
        all_keys, all_values = key, value
        if memory is not None:
            all_keys, all_values = torch.cat([memory[0], key], dim=2), torch.cat([memory[1], value], dim=2)
        out = F.scaled_dot_product_attention(query, all_keys, all_values, is_causal=causal, enable_gqa=True)
        return self.to_out(out.transpose(1, 2).flatten(2)), (key, value)


class SmallSplitBlock(nn.Module):
    """Attention and a gated MLP, each behind a norm; the same class serves both stacks."""

    def __init__(self, hidden_size: int, num_heads: int, num_kv_heads: int, intermediate_size: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(hidden_size, eps=1e-6)
        self.self_attn = SmallSplitAttention(hidden_size, num_heads, num_kv_heads)
        self.post_attention_layernorm = RMSNorm(hidden_size, eps=1e-6)
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(
        self, x: torch.Tensor, rotary: KeyValue, memory: KeyValue | None = None, causal: bool = False
    ) -> tuple[torch.Tensor, KeyValue]:
        """`x`: (batch, tokens, hidden). Returns the output and the attention's own keys and values."""
        attended, own = self.self_attn(self.input_layernorm(x), rotary, memory, causal)
        x = x + attended
        y = self.post_attention_layernorm(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y)), own


class SmallSplitTransformer(SplitOffloadMixin, ModelMixin, ConfigMixin):  # type: ignore[misc]
    """Reasoner (`layers`) over text tokens, generator (`gen_layers`) over image latents."""

    _offload_components: ClassVar[dict[str, list[str]]] = {
        "reasoner": ["layers"],
        "generator": ["gen_layers"],
    }

    @register_to_config
    def __init__(
        self,
        vocab_size: int = 257,
        hidden_size: int = 64,
        num_layers: int = 4,
        num_heads: int = 4,
        num_kv_heads: int = 2,
        intermediate_size: int = 128,
        latent_channels: int = 4,
        patch_size: int = 2,
    ) -> None:
        super().__init__()
        self.head_width = hidden_size // num_heads
        self.patch_size = patch_size
        block = (hidden_size, num_heads, num_kv_heads, intermediate_size)
        patch_width = latent_channels * patch_size**2
        self.embed_tokens = nn.Embedding(vocab_size, hidden_size)
        self.layers = nn.ModuleList(SmallSplitBlock(*block) for _ in range(num_layers))
        self.proj_in = nn.Linear(patch_width, hidden_size)
        self.time_proj = Timesteps(hidden_size, flip_sin_to_cos=True, downscale_freq_shift=0.0)
        self.time_embedder = TimestepEmbedding(hidden_size, hidden_size)
        self.gen_layers = nn.ModuleList(SmallSplitBlock(*block) for _ in range(num_layers))
        self.norm_out = RMSNorm(hidden_size, eps=1e-6)
        self.proj_out = nn.Linear(hidden_size, patch_width)

    def reason(self, input_ids: torch.Tensor) -> list[KeyValue]:
        """Run the reasoner once: (batch, tokens) ids to one pair of keys and values per layer.

        Each of a pair has shape (batch, kv_heads, tokens, head_width).
        """
        memory: list[KeyValue] = []
        with self._offload_context("reasoner"):
            x = self.embed_tokens(input_ids)
            rotary = _rotary(x.shape[1], self.head_width, x.device)
            for layer in self.layers:
                x, own = layer(x, rotary, causal=True)
                memory.append(own)
        return memory

    def forward(self, hidden_states: torch.Tensor, timestep: torch.Tensor, memory: list[KeyValue]) -> torch.Tensor:
        """Predict the velocity of latents (batch, channels, height, width) at `timestep` (batch,)."""
        patch = self.patch_size
        with self._offload_context("generator"):
            x = self.proj_in(F.pixel_unshuffle(hidden_states, patch).flatten(2).transpose(1, 2))
            time = self.time_embedder(self.time_proj(timestep).to(x.dtype))
            x = x + time.unsqueeze(1)
            rotary = _rotary(x.shape[1], self.head_width, x.device)
            for layer, pair in zip(self.gen_layers, memory, strict=True):
                x, _ = layer(x, rotary, memory=pair)
            x = self.proj_out(self.norm_out(x)).transpose(1, 2)
            height, width = hidden_states.shape[-2] // patch, hidden_states.shape[-1] // patch
            return F.pixel_shuffle(x.unflatten(2, (height, width)), patch)


class SmallSplitPipeline(DiffusionPipeline):
    """Text to image with `SmallSplitTransformer`; the tokens of a prompt are its UTF-8 bytes."""

    model_cpu_offload_seq = "transformer->vae"  # type: ignore[assignment]
    _dit_modules: ClassVar[list[str]] = ["transformer"]
    _encoder_modules: ClassVar[list[str]] = []
    _vae_modules: ClassVar[list[str]] = ["vae"]

    # Set by register_modules.
    transformer: Any
    vae: Any
    scheduler: Any

    def __init__(
        self,
        transformer: SmallSplitTransformer,
        vae: AutoencoderKL,
        scheduler: FlowMatchEulerDiscreteScheduler,
    ) -> None:
        super().__init__()
        self.register_modules(transformer=transformer, vae=vae, scheduler=scheduler)
        self.vae_scale_factor = 2 ** (len(self.vae.config.block_out_channels) - 1)
        self.image_processor = VaeImageProcessor(vae_scale_factor=self.vae_scale_factor)

    def tokenize(self, prompts: list[str], length: int) -> torch.Tensor:
        """Ids of shape (prompts, length) on the CPU; shorter prompts are padded with the last id."""
        padding = self.transformer.config.vocab_size - 1
        rows = [list(prompt.encode()[:length]) for prompt in prompts]
        return torch.tensor([row + [padding] * (length - len(row)) for row in rows])

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | list[str],
        negative_prompt: str = "",
        height: int = 64,
        width: int = 64,
        num_inference_steps: int = 4,
        guidance_scale: float = 4.0,
        generator: torch.Generator | None = None,
        output_type: str = "pil",
        max_sequence_length: int = 64,
        return_dict: bool = True,
    ) -> ImagePipelineOutput | tuple[Any]:
        """Make one image per prompt; `height` and `width` are pixels, multiples of the VAE's factor times
        the patch size. `guidance_scale` above 1 adds the unconditional half of the batch."""
        device, dtype = self._execution_device, self.transformer.dtype
        multiple = self.vae_scale_factor * self.transformer.config.patch_size
        if height % multiple or width % multiple:
            raise ValueError(f"height and width must be multiples of {multiple}, got {height} and {width}")
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        guided = guidance_scale > 1.0
        texts = [negative_prompt] * len(prompts) + prompts if guided else prompts
        memory = self.transformer.reason(self.tokenize(texts, max_sequence_length).to(device))

        factor, channels = self.vae_scale_factor, self.transformer.config.latent_channels
        shape = (len(prompts), channels, height // factor, width // factor)
        latents = randn_tensor(shape, generator=generator, device=device, dtype=torch.float32)
        self.scheduler.set_timesteps(num_inference_steps, device=device)
        for t in self.progress_bar(self.scheduler.timesteps):
            batch = torch.cat([latents, latents]) if guided else latents
            velocity = self.transformer(batch.to(dtype), t.expand(len(batch)), memory).float()
            if guided:
                plain, wanted = velocity.chunk(2)
                velocity = plain + guidance_scale * (wanted - plain)
            latents = self.scheduler.step(velocity, t, latents, return_dict=False)[0]

        image = latents
        if output_type != "latent":
            image = self.vae.decode((latents / self.vae.config.scaling_factor).to(self.vae.dtype)).sample
            image = self.image_processor.postprocess(image, output_type=output_type)
        self.maybe_free_model_hooks()
        return ImagePipelineOutput(images=image) if return_dict else (image,)
