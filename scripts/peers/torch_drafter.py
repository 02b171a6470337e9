"""DSpark's drafter and its training step in plain PyTorch: a mask tensor, all logits materialised, fused AdamW."""

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from torch_llama import rotate

LOSS_DECAY_GAMMA = 4.0
MAX_GRAD_NORM = 1.0

Angles = tuple[Tensor, Tensor]


class Attention(nn.Module):
    """Block rows attend to context rows and to their block; one set of projections for both sources."""

    def __init__(self, c: dict):
        super().__init__()
        q, kv = c["heads"] * c["head_dim"], c["kv_heads"] * c["head_dim"]
        self.head_dim, self.group = c["head_dim"], c["heads"] // c["kv_heads"]
        self.q_proj = nn.Linear(c["hidden"], q, bias=False)
        self.k_proj = nn.Linear(c["hidden"], kv, bias=False)
        self.v_proj = nn.Linear(c["hidden"], kv, bias=False)
        self.o_proj = nn.Linear(q, c["hidden"], bias=False)
        self.q_norm = nn.RMSNorm(c["head_dim"], eps=c["rms_norm_eps"])
        self.k_norm = nn.RMSNorm(c["head_dim"], eps=c["rms_norm_eps"])

    def heads(self, x: Tensor) -> Tensor:
        """`[rows, heads · head_dim]` to `[rows, heads, head_dim]`."""
        return x.unflatten(-1, (-1, self.head_dim))

    def forward(self, x: Tensor, context: Tensor, block_angles: Angles, all_angles: Angles, mask: Tensor) -> Tensor:
        """Mixed rows of the blocks."""
        both = torch.cat((context, x))
        q = self.q_norm(self.heads(self.q_proj(x))).transpose(0, 1)
        k = self.k_norm(self.heads(self.k_proj(both))).transpose(0, 1)
        v = self.heads(self.v_proj(both)).transpose(0, 1)
        q, k = rotate(q, *block_angles), rotate(k, *all_angles)
        k, v = (t.repeat_interleave(self.group, dim=0) for t in (k, v))
        mixed = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask)[0]
        return self.o_proj(mixed.transpose(0, 1).flatten(1))


class Mlp(nn.Module):
    """The gated MLP of the target's shape."""

    def __init__(self, c: dict):
        super().__init__()
        self.gate_proj = nn.Linear(c["hidden"], c["intermediate"], bias=False)
        self.up_proj = nn.Linear(c["hidden"], c["intermediate"], bias=False)
        self.down_proj = nn.Linear(c["intermediate"], c["hidden"], bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Rows to rows."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    """One layer of the backbone."""

    def __init__(self, c: dict):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(c["hidden"], eps=c["rms_norm_eps"])
        self.self_attn = Attention(c)
        self.post_attention_layernorm = nn.RMSNorm(c["hidden"], eps=c["rms_norm_eps"])
        self.mlp = Mlp(c)

    def forward(self, x: Tensor, *attended) -> Tensor:
        """Block rows to block rows."""
        x = x + self.self_attn(self.input_layernorm(x), *attended)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    """The trainable part; modules have the names of the checkpoint's tensors."""

    def __init__(self, c: dict):
        super().__init__()
        self.fc = nn.Linear(c["hidden"] * len(c["target_layers"]), c["hidden"], bias=False)
        self.hidden_norm = nn.RMSNorm(c["hidden"], eps=c["rms_norm_eps"])
        self.layers = nn.ModuleList(DraftLayer(c) for _ in range(c["draft_layers"]))
        self.norm = nn.RMSNorm(c["hidden"], eps=c["rms_norm_eps"])
        w1 = nn.Embedding(c["vocab"], c["markov_rank"])
        w2 = nn.Linear(c["markov_rank"], c["vocab"], bias=False)
        self.markov_head = nn.ModuleDict({"markov_w1": w1, "markov_w2": w2})
        self.confidence_head = nn.ModuleDict({"proj": nn.Linear(c["hidden"] + c["markov_rank"], 1)})


class Training:
    """A training run on the weights and inputs in a file."""

    def __init__(self, path: str, config: dict):
        self.config = config
        tensors = load_file(path)
        inputs = {name.removeprefix("input."): tensors.pop(name) for name in list(tensors) if name.startswith("input.")}
        self.embed, self.lm_head = tensors.pop("embed_tokens.weight"), tensors.pop("lm_head.weight")
        with torch.device("meta"):
            self.drafter = Drafter(config)
        self.drafter.load_state_dict({name: tensor.clone() for name, tensor in tensors.items()}, assign=True)
        self.features, self.target_hidden = inputs["features"], inputs["target_hidden"]
        settings = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "fused": True}
        self.optimizer = torch.optim.AdamW(self.drafter.parameters(), lr=config["lr"], **settings)
        self.lay_out(inputs["tokens"].long(), inputs["anchors"].long(), inputs["inverse_frequencies"])

    def lay_out(self, tokens: Tensor, anchors: Tensor, inverse: Tensor) -> None:
        """What depends on tokens and anchors alone: input rows, labels, weights, angles and the mask."""
        slots, context = self.config["slots"], len(tokens)
        positions = (anchors[:, None] + torch.arange(slots)).flatten()
        self.target_rows, self.labels, self.previous = positions, tokens[positions + 1], tokens[positions]
        block_tokens = torch.full((len(anchors), slots), self.config["mask_token_id"])
        block_tokens[:, 0] = tokens[anchors]
        self.inputs = F.embedding(block_tokens.flatten(), self.embed)
        self.weights = torch.exp(-torch.arange(slots) / LOSS_DECAY_GAMMA).repeat(len(anchors))

        def angles(at: Tensor) -> Angles:
            both = torch.outer(at.float(), inverse).repeat(1, 2)
            return both.cos(), both.sin()

        block = torch.arange(len(positions)) // slots
        sees_context = torch.arange(context) < anchors[block, None]
        mask = torch.cat((sees_context, block[:, None] == block), dim=1)
        self.attended = angles(positions), angles(torch.cat((torch.arange(context), positions))), mask

    def loss(self) -> Tensor:
        """0.1 CE + 0.9 TV + confidence, each weighted by slot."""
        d = self.drafter
        context = d.hidden_norm(d.fc(self.features))
        x = self.inputs
        for layer in d.layers:
            x = layer(x, context, *self.attended)
        hidden = d.norm(x)
        latent = d.markov_head["markov_w1"](self.previous)
        logits = F.linear(hidden, self.lm_head) + d.markov_head["markov_w2"](latent)
        with torch.no_grad():
            target = F.linear(self.target_hidden[self.target_rows], self.lm_head).softmax(-1)
        ce = F.cross_entropy(logits, self.labels, reduction="none")
        tv = (logits.softmax(-1) - target).abs().sum(-1)
        confidence = d.confidence_head["proj"](torch.cat((hidden, latent), dim=-1)).squeeze(-1)
        accepted = 1 - 0.5 * tv.detach()
        bce = F.binary_cross_entropy_with_logits(confidence, accepted, reduction="none")
        return (self.weights * (0.1 * ce + 0.9 * tv + bce)).sum() / (self.weights.sum() + 1e-6)

    def step(self) -> tuple[float, float]:
        """One step; returns the loss and the norm of the gradient before clipping."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.drafter.parameters(), MAX_GRAD_NORM)
        self.optimizer.step()
        return loss.item(), norm.item()
