"""A Llama of plain PyTorch operations, with the weights of a GGUF file widened to f32."""

import torch
import torch.nn.functional as F
from gguf import GGUFReader
from gguf.quants import dequantize
from torch import Tensor, nn


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of `[.., heads, positions, head_dim]`, halves rotated against each other."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Layer(nn.Module):
    """One decoder layer; weights have GGUF's names."""

    def __init__(self, weights: dict[str, Tensor], heads: int, kv_heads: int, eps: float):
        super().__init__()
        self.group, self.eps, self.weights = heads // kv_heads, eps, weights

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`[batch, positions, hidden]` to the same."""
        w, hidden = self.weights, x.shape[-1:]
        h = F.rms_norm(x, hidden, w["attn_norm"], self.eps)
        q, k, v = (F.linear(h, w[f"attn_{name}"]) for name in "qkv")
        q, k, v = (t.unflatten(-1, (-1, cos.shape[-1])).transpose(1, 2) for t in (q, k, v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = (t.repeat_interleave(self.group, dim=1) for t in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.linear(mixed.transpose(1, 2).flatten(2), w["attn_output"])
        h = F.rms_norm(x, hidden, w["ffn_norm"], self.eps)
        return x + F.linear(F.silu(F.linear(h, w["ffn_gate"])) * F.linear(h, w["ffn_up"]), w["ffn_down"])


class Llama(nn.Module):
    """Embedding, layers, final norm; the output head is the embedding unless the file has one."""

    def __init__(self, path: str):
        super().__init__()
        reader = GGUFReader(path)
        tensors = {t.name: torch.from_numpy(dequantize(t.data, t.tensor_type).copy()) for t in reader.tensors}

        def field(name: str):
            return reader.fields[f"llama.{name}"].contents()

        heads, kv_heads = field("attention.head_count"), field("attention.head_count_kv")
        self.eps = field("attention.layer_norm_rms_epsilon")
        self.embed, self.norm = tensors["token_embd.weight"], tensors["output_norm.weight"]
        self.head = tensors.get("output.weight", self.embed)
        self.layers = nn.ModuleList()
        for i in range(field("block_count")):
            prefix = f"blk.{i}."
            own = {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
            weights = {name.removeprefix(prefix).removesuffix(".weight"): tensor for name, tensor in own.items()}
            weights["attn_q"] = halves(weights["attn_q"], heads)
            weights["attn_k"] = halves(weights["attn_k"], kv_heads)
            self.layers.append(Layer(weights, heads, kv_heads, self.eps))
        head_dim = self.embed.shape[1] // heads
        self.inverse = field("rope.freq_base") ** -(torch.arange(0, head_dim, 2) / head_dim)

    def forward(self, tokens: Tensor) -> Tensor:
        """Final normalised rows of `[batch, positions]` tokens."""
        angles = torch.outer(torch.arange(tokens.shape[1]), self.inverse).repeat(1, 2)
        cos, sin = angles.cos(), angles.sin()
        x = F.embedding(tokens, self.embed)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.rms_norm(x, x.shape[-1:], self.norm, self.eps)


def halves(weight: Tensor, heads: int) -> Tensor:
    """Rows of a query or key projection from GGUF's order, pairs side by side, to one half after the other."""
    pairs = weight.shape[0] // heads // 2
    return weight.unflatten(0, (heads, pairs, 2)).transpose(1, 2).flatten(0, 2).contiguous()
