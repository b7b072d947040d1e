"""DSpark: confidence-scheduled speculative decoding, in one file (arXiv 2607.05147).

A large target model writes the text. A small draft model guesses the next tokens and the target
checks all guesses in one forward pass, keeping those it would have written itself: the text stays
its own and only arrives faster. The draft is a backbone that proposes a block in one parallel pass
(DFlash, sec. 2.2), a low-rank Markov head that ties each token of the block to the one before it
(sec. 3.1), and a confidence head that says how much of the block is worth checking (sec. 3.2). Read
from top to bottom; the objective (sec. 3.3) is in train.py.

Paper symbol, name here, meaning
    M_t, M_d   target, draft     large model, frozen; small model
    p_t, p_d   p, q              their distributions of the next token
    gamma      gamma             drafts per block: block_size if the anchor's slot predicts, or - 1
    x_0        anchor            the target's last token; its hidden state does not exist yet
    h_k, U_k   hidden, base      backbone state and base logits of slot k
    B_k        bias              Markov head's logit bias of slot k
    c_k        confidence        P(slot k accepted | all before it were); its label: sum min(p, q)
    a_{r,j}    survival          c_{r,1} * ... * c_{r,j}
    l_r        lengths           drafts of request r that are sent to verification, 0..gamma
    SPS(B)     steps_per_second  target forwards per second when each carries B tokens in all
    tau        accepted_length   tokens committed per round, the target's own token included
Shapes, at the end of the line that changes them
    B sequences   S positions       N anchors      K slots of a block = block_size   M any rows
    R requests    T packed tokens   L cache slots  g drafts of a round <= gamma      C candidates
    d hidden      H heads           G kv heads     e head_dim      n tapped layers   r Markov rank
    V target vocabulary             D draft vocabulary
Where we differ from the public code (speculators 0.9.0, DeepSpec), and why
    * confidence labels use the target's probability over all of V, as acceptance itself does;
    * a slot is supervised by the token it predicts (speculators: by the slot's own position), and
      losses are weighted means, sum(w * term) / sum(w) (speculators divides by the slot count);
    * verification is packed: R + sum(l_r) tokens in one row; only attention pads to the longest.
"""
import bisect
import contextlib
import dataclasses
import functools
import inspect
import itertools
import json
import math
import os
import pathlib
import statistics
import time
from collections import deque, namedtuple

import numpy
import torch
import torch.nn.functional as F
from huggingface_hub import snapshot_download
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AttentionInterface

def require(condition, message):
    """Bad input stops at the door, with what was expected and what came."""
    if not condition:
        raise ValueError(message)

# ---------------------------------------------------------------------------------- configuration
@dataclasses.dataclass
class DSparkConfig:
    """Sizes and switches of a draft, named as in the public config.json; ValueError if they clash.
    target_layer_ids count layer outputs from 0, as DeepSpec does: k is hidden_states[k + 1]."""
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    num_target_layers: int
    target_layer_ids: list
    mask_token_id: int
    num_hidden_layers: int = 3
    draft_vocab_size: int = 0  # 0: the target's whole vocabulary
    block_size: int = 8
    sample_from_anchor: bool = True
    markov_rank: int = 256  # 0: no Markov head, pure DFlash
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_position_embeddings: int = 32768
    layer_types: list = ()  # empty: full attention everywhere
    sliding_window: int = 0
    sliding_window_non_causal: bool = True  # sliding layers: the own block in both directions
    sliding_window_from_slot: bool = False  # z-lab: windows end at the slot, not at the anchor
    verifier: dict = dataclasses.field(default_factory=dict)  # name_or_path, architectures
    dspark_extra: dict = dataclasses.field(default_factory=dict)  # ours alone

    def __post_init__(self):
        self.draft_vocab_size = self.draft_vocab_size or self.vocab_size
        self.layer_types = list(self.layer_types) or ["full_attention"] * self.num_hidden_layers
        sliding = "sliding_attention" in self.layer_types
        self.sliding_window_non_causal |= not sliding  # vLLM takes false for full layers as well
        rows, last, ids = self.vocab_size, self.num_target_layers - 1, list(self.target_layer_ids)
        for name, low, high in (("block_size", 2, 1024), ("num_hidden_layers", 1, 1024),
                                ("markov_rank", 0, rows), ("draft_vocab_size", 1, rows),
                                ("mask_token_id", 0, rows - 1)):
            value = getattr(self, name)
            require(low <= value <= high, f"{name} must be in {low}..{high}, got {value}")
        require(self.markov_head_type in MARKOV_HEADS,
                f"markov_head_type must be vanilla, gated or rnn, got {self.markov_head_type!r}")
        kinds, count = {*self.layer_types} - {"full_attention"}, self.num_hidden_layers
        require(kinds <= {"sliding_attention"} and len(self.layer_types) == count and
                self.sliding_window >= sliding, f"expected {count} layer_types, full_attention or "
                f"sliding_attention (with a sliding_window), got {self.layer_types}")
        wants_markov = self.enable_confidence_head and self.confidence_head_with_markov
        require(self.markov_rank or not wants_markov, "markov_rank 0 leaves the confidence head no "
                "Markov embedding: add --no-confidence-head-with-markov")
        require(ids and ids == sorted(set(ids)) and ids[0] >= 0 and ids[-1] < last,
                f"target_layer_ids must increase within 0..{last - 1}, got {ids} (the last layer's "
                "output is only stored after the final norm)")

    @property
    def first_slot(self):
        """The first slot that predicts: the anchor's own in DSpark, the one after it in DFlash."""
        return 0 if self.sample_from_anchor else 1

    @property
    def gamma(self):
        return self.block_size - self.first_slot

# -------------------------------------------------------------------- acceptance rule (sec. 2.1)
def probabilities(logits, temperature, top_k=0, top_p=1.0):
    """Sampling distribution [..., V] in float32: temperature, top-k, top-p, as Hugging Face orders
    them. One for draft and target: acceptance is exact only for the very q a token came from."""
    scores = logits.float() / temperature
    if not top_k and top_p >= 1:
        return scores.softmax(-1)
    width = min(top_k or scores.shape[-1], scores.shape[-1])
    values, ids = scores.topk(width, dim=-1)  # sorted, but only what top-k leaves
    probs = values.softmax(-1)
    if top_p < 1:
        mass_above = probs.cumsum(-1) - probs
        probs = probs * (mass_above < top_p)
    return torch.zeros_like(scores).scatter(-1, ids, probs / probs.sum(-1, keepdim=True))

def draw(weights, uniform):
    """Inverse-CDF sample: the smallest i with uniform * total < cdf_i. [..., V], [...] -> [...]"""
    cdf = weights.double().cumsum(-1)
    below = cdf <= uniform.double()[..., None] * cdf[..., -1:]
    return below.sum(-1).clamp(max=weights.shape[-1] - 1)

def accept(tokens, lengths, q, p, uniforms):
    """The acceptance rule for R requests at once; `verify` is this for one.

    tokens [R, g], of which lengths [R] count, drawn from the draft's q [R, g, V]; the target's p
    [R, g + 1, V]; uniforms [R, g + 1] -> accepted, next_token [R]. At temperature 0 both are
    one-hot: p is then the target's argmax [R, g + 1], which a draft must equal; q is not used."""
    (rows, g), greedy = tokens.shape, p.dim() == 2
    each, slot = (torch.arange(n, device=tokens.device) for n in (rows, g))
    if greedy:
        passes = tokens == p[:, :g]
    else:
        p_x, q_x = (x[:, :g].gather(2, tokens[..., None])[..., 0] for x in (p, q))  # [R, g]
        passes = uniforms[:, :g] < (p_x / q_x.clamp(min=1e-8)).clamp(max=1)
    # Left to right, up to the first failure or to lengths.
    accepted = (passes & (slot < lengths[:, None])).long().cumprod(1).sum(1)  # [R]
    p_next = p[each, accepted]  # [R, V], or [R] token ids
    if greedy or g == 0:
        return accepted, p_next if greedy else draw(p_next, uniforms[:, -1])
    # After a rejection: the residual max(p - q, 0). After full acceptance q counts as zero.
    q_next = q[each, accepted.clamp(max=g - 1)] * (accepted < lengths)[:, None]
    residual = (p_next - q_next).clamp(min=0)  # [R, V]
    equal = residual.sum(-1, keepdim=True) <= 1e-8  # p <= q everywhere, so p = q
    return accepted, draw(torch.where(equal, p_next, residual), uniforms[:, -1])

def verify(draft_tokens, draft_probs, target_probs, generator=None, uniforms=None):
    """Accept a prefix of one request's drafts and draw the token after it.

    draft_tokens [l], draft_probs [l, V], target_probs [l + 1, V] -> (n_accepted, next_token).
    uniforms [l + 1] fixes the randomness, the last is for the draw: draft i passes while
    u_i < min(1, p / max(q, 1e-8)), strictly; as DeepSpec's verify_draft_tokens."""
    l = len(draft_tokens)
    require(len(draft_probs) == l and len(target_probs) == l + 1, f"verify expects {l} draft and "
            f"{l + 1} target distributions, got {len(draft_probs)} and {len(target_probs)}")
    if uniforms is None:
        uniforms = torch.rand(l + 1, dtype=torch.float64, generator=generator)
    length = torch.tensor([l], device=draft_tokens.device)
    one = (draft_tokens[None], length, draft_probs[None], target_probs[None])
    accepted, token = accept(*one, uniforms[None].to(draft_tokens.device))
    return int(accepted), int(token)

# ------------------------------------------------------------ backbone: DFlash (sec. 2.2, eq. 2-3)
def visibility(position, document, context_position, context_document, config, window=0):
    """What each slot may attend to: the one rule for training and drafting.

    A slot of the block anchored at `position` sees all slots of its block, no other block, and the
    context (target states) of its document STRICTLY before the anchor, whose own state does not
    exist yet when drafting. A sliding layer (published drafts have them) sees the last `window` of
    those rows, maybe its block causally; in z-lab's checkpoints the window ends at the slot itself.
    position, document [B, N] of the anchors; context_* [B, S] -> bool [B, N K, S + N K]"""
    blocks, size = position.shape[1], config.block_size
    sees = context_position[:, None] < position[..., None]  # [B, N, S]
    sees &= context_document[:, None] == document[..., None]
    sees = sees.repeat_interleave(size, 1)  # [B, N K, S]
    slot = torch.arange(blocks * size, device=position.device)
    own = slot[:, None] // size == slot // size  # [N K, N K]
    if window:
        first = position.repeat_interleave(size, 1) - window  # [B, N K]
        if config.sliding_window_from_slot:
            first = first + slot % size + 1
            own &= (slot[:, None] - slot).abs() < window
        sees &= context_position[:, None] >= first[..., None]
        if not config.sliding_window_non_causal:
            own &= slot[:, None] >= slot
    return torch.cat([sees, own.expand(len(sees), -1, -1)], -1)  # [B, N K, S + N K]

def attend(query, key, value, bias, scale):
    """query [B, H, q, e]; key, value [B, G, k, e]; bias as from fold_mask -> [B, H, q, e]"""
    folded = query.reshape(len(query), key.shape[1], -1, key.shape[3])  # [B, G, H/G q, e]
    out = F.scaled_dot_product_attention(folded, key, value, bias, scale=scale)
    return out.reshape(*query.shape[:3], -1)

def fold_mask(mask, fold, dtype):
    """bool [B, q, k] -> what `attend` adds to the scores, [B, 1, H/G q, k]: the queries of heads
    that share keys lie one after another. Made once for all layers."""
    bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return bias.masked_fill(~mask, torch.finfo(dtype).min).repeat(1, fold, 1)[:, None]

def rotary(position, dim, theta):
    """RoPE tables: position [B, q] -> cos, sin [B, 1, q, e]"""
    step = torch.arange(0, dim, 2, device=position.device) / dim
    angle = position[..., None] * theta**-step  # [B, q, e/2]
    angle = torch.cat([angle, angle], -1)[:, None]  # [B, 1, q, e]
    return angle.cos(), angle.sin()

def rotate(x, rope):
    """Apply RoPE to x [B, heads, q, e]."""
    first, second = x.chunk(2, -1)
    return (x * rope[0] + torch.cat([-second, first], -1) * rope[1]).to(x.dtype)

def linear(x, weight, bias=None):
    """x W^T + b. On a CPU the float32 product with a large weight takes as long for 16 rows as for
    64; a batch of narrow products (below 16 rows) and swapped factors (from there on) need half to
    three quarters of that (SmolLM2, 2 cores: a forward of 4 tokens 110 ms, narrow 81, on a Xeon;
    of 3 tokens 128 ms, narrow 67, on an EPYC)."""
    rows, big = x.numel() // x.shape[-1], weight.numel() > 2**16
    if not (big and 2 <= rows <= 48 and x.dtype == torch.float32 and x.device.type == "cpu"):
        return F.linear(x, weight, bias)
    flat, width = x.reshape(rows, -1), math.gcd(len(weight), 32)
    if rows < 16 and width > 8:
        parts = weight.view(-1, width, flat.shape[1]).transpose(1, 2)
        out = (flat.expand(len(parts), -1, -1) @ parts).transpose(0, 1).flatten(1)
    else:
        out = (weight @ flat.T).T.contiguous()
    return (out if bias is None else out + bias).view(*x.shape[:-1], -1)

class Linear(nn.Linear):
    def forward(self, x):
        return linear(x, self.weight, self.bias)

class RMSNorm(nn.RMSNorm):
    """In the precision of its weights: float32 in training, under bfloat16 autocast too."""
    def forward(self, x):
        return super().forward(x.to(self.weight.dtype))

class Layer(nn.Module):
    """A Qwen3 decoder layer whose attention reads [context ; block] (eq. 3)."""
    def __init__(self, config):
        super().__init__()
        dense = functools.partial(Linear, bias=False)
        norm = functools.partial(RMSNorm, eps=config.rms_norm_eps)
        d, wide, self.dim = config.hidden_size, config.intermediate_size, config.head_dim
        heads = config.num_attention_heads * self.dim
        groups = config.num_key_value_heads * self.dim
        self.input_layernorm, self.post_attention_layernorm = norm(d), norm(d)
        self.self_attn = nn.ModuleDict(dict(
            q_proj=dense(d, heads), k_proj=dense(d, groups), v_proj=dense(d, groups),
            o_proj=dense(heads, d), q_norm=norm(self.dim), k_norm=norm(self.dim)))
        self.mlp = nn.ModuleDict(dict(
            gate_proj=dense(d, wide), up_proj=dense(d, wide), down_proj=dense(wide, d)))

    def split(self, x):
        return x.unflatten(-1, (-1, self.dim)).transpose(1, 2)  # [B, heads, q, e]

    def keys_values(self, x, rope):
        """Context and block alike: [B, q, d] -> rotated keys, values [B, G, q, e]"""
        key = self.self_attn.k_norm(self.split(self.self_attn.k_proj(x)))
        return rotate(key, rope), self.split(self.self_attn.v_proj(x))

    def forward(self, x, context, rope, masks):
        """x [B, N K, d], context keys and values [B, G, S, e]; a mask for each group of blocks, of
        their slots by the context they see and themselves -> [B, N K, d]"""
        block = self.input_layernorm(x)
        query = rotate(self.self_attn.q_norm(self.split(self.self_attn.q_proj(block))), rope)
        key, value = self.keys_values(block, rope)
        sizes = [mask.shape[2] * key.shape[1] // query.shape[1] for mask in masks]  # slots of each
        out = []
        for mask, q, *own in zip(masks, *(x.split(sizes, 2) for x in (query, key, value))):
            reach = mask.shape[3] - q.shape[2]
            seen = (torch.cat([x[:, :, :reach], y], 2) for x, y in zip(context, own))
            out.append(attend(q, *seen, mask, self.dim**-0.5))  # [B, H, slots, e]
        out = torch.cat(out, 2).transpose(1, 2).flatten(2)  # [B, N K, H e]
        x = x + self.self_attn.o_proj(out)
        block = self.post_attention_layernorm(x)
        return x + self.mlp.down_proj(F.silu(self.mlp.gate_proj(block)) * self.mlp.up_proj(block))

# ---------------------------------------------------------------- Markov heads (sec. 3.1, eq. 4-6)
class VanillaHead(nn.Module):
    """B_k = W2 W1[x_{k-1}] (eq. 5): the previous token alone shifts the logits. W1 looks up TARGET
    token ids, W2 projects to the DRAFT vocabulary."""
    def __init__(self, config):
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = Linear(config.markov_rank, config.draft_vocab_size, bias=False)

    def mix(self, embedding, hidden, state):
        """embedding [..., r], hidden [..., d], state [..., r] or None -> latent [..., r], state"""
        return embedding, state

    def step(self, embedding, hidden, state=None, w2_rows=None):
        """One slot, for training, drafting and tests; no state before slot 0. embedding [..., r] =
        W1[prev], hidden [..., d] -> bias [..., D], or [..., C] with w2_rows [..., C, r]; state"""
        latent, state = self.mix(embedding, hidden, state)
        if w2_rows is None:
            return self.markov_w2(latent), state
        return (w2_rows @ latent[..., None])[..., 0], state

    def unroll(self, embedding, hidden):
        """A teacher-forced block: embedding [M, K, r], hidden [M, K, d] -> bias [M, K, D]"""
        return self.step(embedding, hidden)[0]  # without a state all slots are one call

class GatedHead(VanillaHead):
    """Vanilla plus a gate per rank: B_k = W2 (sigmoid(W [h_k ; W1[prev]]) * W1[prev])."""
    def __init__(self, config):
        super().__init__(config)
        self.gate_proj = Linear(config.hidden_size + config.markov_rank, config.markov_rank)

    def mix(self, embedding, hidden, state):
        gate = torch.sigmoid(self.gate_proj(torch.cat([hidden, embedding], -1)))
        return gate * embedding, state

class RNNHead(VanillaHead):
    """Vanilla plus a memory s of the block's earlier tokens: B_k = W2 tanh(o), with o and the next
    s from s, W1[prev] and h_k (eq. 6)."""
    def __init__(self, config):
        super().__init__(config)
        rank = config.markov_rank
        self.joint_proj = Linear(config.hidden_size + 2 * rank, 3 * rank)

    def mix(self, embedding, hidden, state):
        state = torch.zeros_like(embedding) if state is None else state
        joint = self.joint_proj(torch.cat([state, embedding, hidden], -1))
        gate, candidate, output = joint.chunk(3, -1)  # [..., r] each
        keep = torch.sigmoid(gate)
        return torch.tanh(output), keep * state + (1 - keep) * torch.tanh(candidate)

    def unroll(self, embedding, hidden):
        biases, state = [], None
        for slot in zip(embedding.unbind(1), hidden.unbind(1)):
            bias, state = self.step(*slot, state)
            biases.append(bias)
        return torch.stack(biases, 1)

MARKOV_HEADS = {"vanilla": VanillaHead, "gated": GatedHead, "rnn": RNNHead}

# ------------------------------------------------------------------------------- the draft model
# hidden [B, N, K, d], logits [B, N, K, D] with the Markov bias, confidence_logits [B, N, K] | None
DraftOutput = namedtuple("DraftOutput", "hidden logits confidence_logits")
# tokens [R, g] target ids, drawn from q [R, g, V] (None if greedy); confidence logits [R, g] | None
# and hidden [R, K, d], from which `heads` can tell what it saw in each slot
Proposal = namedtuple("Proposal", "tokens q confidence_logits hidden")
BLOCKS_TOGETHER = 16  # attend together in training

class DSparkDraft(nn.Module):
    """The draft model M_d. Embedding and LM head are the target's: shared, frozen, not saved."""
    def __init__(self, config, target, draft_ids):
        """draft_ids [D], ascending: draft -> target id"""
        super().__init__()
        self.config, d, eps = config, config.hidden_size, config.rms_norm_eps
        self.own = []  # which of embed_tokens and lm_head are not the target's, hence saved
        head = check_target(target)
        ids = torch.as_tensor(draft_ids, device=head.device)
        require(ids[0] >= 0 and (ids.diff() > 0).all() and ids[-1] < len(head),
                "draft_ids, or draft ids + d2t, must be ascending ids of the target")
        self.fc = Linear(len(config.target_layer_ids) * d, d, bias=False)
        self.hidden_norm, self.norm = RMSNorm(d, eps), RMSNorm(d, eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.markov_head, self.confidence_head = None, None
        if config.markov_rank:
            self.markov_head = MARKOV_HEADS[config.markov_head_type](config)
        if config.enable_confidence_head:  # eq. 7; the embedding enters ungated for every head
            width = d + config.markov_rank * config.confidence_head_with_markov
            self.confidence_head = nn.ModuleDict({"proj": nn.Linear(width, 1)})
        self.shapes = {name: tuple(x.shape) for name, x in self.state_dict().items()}
        shared = dict(embed_tokens=target.get_input_embeddings().weight, target_head=head,
                      lm_head=head if len(ids) == len(head) else head[ids], draft_ids=ids)
        for name, tensor in shared.items():
            self.register_buffer(name, tensor.detach(), persistent=False)  # no gradient, not saved
        self.to(head.device)

    @classmethod
    def from_target(cls, target, draft_ids=None, markov_std=0.01, **overrides):
        """A fresh draft for a loaded causal LM; overrides are fields of DSparkConfig. draft_ids [D]
        ascending: the draft vocabulary. mask_token_id (the last row) must never occur in text."""
        if draft_ids is not None:
            overrides["draft_vocab_size"] = len(draft_ids)
        config = config_for(target, overrides)
        ids = torch.arange(config.draft_vocab_size) if draft_ids is None else draft_ids
        draft = cls(config, target, ids)
        if draft.markov_head is not None:
            nn.init.normal_(draft.markov_head.markov_w1.weight, std=markov_std)
        return draft

    def context_keys_values(self, features, position):
        """H_ctx = RMSNorm(W_c [H^(l1); ...]) (eq. 2), projected for every layer: features
        [B, S, n d], position [B, S] -> per layer keys, values [B, G, S, e]"""
        context = self.hidden_norm(self.fc(features.to(self.fc.weight.dtype)))  # [B, S, d]
        rope = rotary(position, self.config.head_dim, self.config.rope_theta)
        return [layer.keys_values(context, rope) for layer in self.layers]

    def run_blocks(self, anchor, position, document, context, context_position, context_document,
                   reach=None):
        """Blocks [anchor, mask, mask, ...] in one parallel pass. anchor tokens, their position and
        document [B, N]; keys and values, position, document of context -> hidden [B, N, K, d].
        reach: how far into the context the first 16 blocks see, the next 16, ...; None: all of it.
        Blocks do not see each other either, so with anchors in order this halves the attention."""
        config, slot = self.config, torch.arange(self.config.block_size, device=position.device)
        ids = torch.where(slot == 0, anchor[..., None], config.mask_token_id)  # [B, N, K]
        x = F.embedding(ids, self.embed_tokens).flatten(1, 2).to(self.fc.weight.dtype)  # [B, NK, d]
        rope = rotary((position[..., None] + slot).flatten(1), config.head_dim, config.rope_theta)
        windows = [config.sliding_window * (k == "sliding_attention") for k in config.layer_types]
        fold = config.num_attention_heads // config.num_key_value_heads
        size = BLOCKS_TOGETHER if reach else anchor.shape[1]
        blocks = [*zip(position.split(size, 1), document.split(size, 1),
                       reach or [context_position.shape[1]])]
        masks = {w: [fold_mask(visibility(
            *block, context_position[:, :end], context_document[:, :end], config, w), fold, x.dtype)
            for *block, end in blocks] for w in set(windows)}
        for layer, keys_values, window in zip(self.layers, context, windows):
            x = layer(x, keys_values, rope, masks[window])
        return self.norm(x).unflatten(1, (-1, config.block_size))  # [B, N, K, d]

    def backbone(self, features, input_ids, anchors, document_ids=None, position_ids=None):
        """Blocks at many anchors of packed rows at once, for training -> hidden [B, N, K, d]"""
        if document_ids is None:
            document_ids = torch.zeros_like(input_ids)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)
            position_ids = position_ids.expand(input_ids.shape)
        context = self.context_keys_values(features, position_ids)
        blocks = (row.gather(1, anchors) for row in (input_ids, position_ids, document_ids))
        reach = [int(some.max()) for some in anchors.cpu().split(BLOCKS_TOGETHER, 1)]
        return self.run_blocks(*blocks, context, position_ids, document_ids, reach)

    def heads(self, hidden, prev, embedding=None):
        """Teacher-forced: hidden [M, K, d], prev [M, K] (the token before the one a slot predicts)
        -> U_k + B_k [M, K, D] (eq. 4), confidence logits [M, K] or None. embedding [M, K, r] is
        W1[prev], looked up where it is not given."""
        logits = self.base_logits(hidden)
        if self.markov_head is not None:
            embedding = self.markov_head.markov_w1(prev) if embedding is None else embedding
            logits = logits + self.markov_head.unroll(embedding, hidden)  # eq. 4
        return logits, self.confidence(hidden, embedding)

    def base_logits(self, hidden):
        """U_k = lm_head(h_k): [M, K, d] -> [M, K, D]. In 2-D, else F.linear copies the weights."""
        flat = hidden.flatten(0, 1).to(self.lm_head.dtype)
        return linear(flat, self.lm_head).unflatten(0, hidden.shape[:2])

    def confidence(self, hidden, embedding):
        """Logit of c_k = sigmoid(w . [h_k ; W1[prev_k]] + b): [..., d], [..., r] -> [...], None"""
        if self.confidence_head is None:
            return None
        if self.config.confidence_head_with_markov:
            hidden = torch.cat([hidden, embedding], -1)
        return self.confidence_head.proj(hidden)[..., 0]

    def calibrated(self, confidence_logits, temperature):
        """c_k [R, g] by the STS temperatures that fit the sampling temperature best; 1 if none."""
        config = self.config
        stored = config.dspark_extra.get("sts_temperatures") or {"1": [1.0] * config.gamma}
        nearest = min(stored, key=lambda t: abs(float(t) - temperature))
        scale = confidence_logits.new_tensor(stored[nearest])[: confidence_logits.shape[1]]
        return (confidence_logits / scale).float().sigmoid()

    def previous_tokens(self, input_ids, anchors):
        """The token before the one slot k predicts; anchors index the row -> [B, N, K]"""
        slot = torch.arange(self.config.block_size, device=anchors.device)
        index = anchors[..., None] + (slot - self.config.first_slot).clamp(min=0)
        index = index.clamp(max=input_ids.shape[1] - 1)
        return input_ids.gather(1, index.flatten(1)).view(index.shape)

    def forward(self, features, input_ids, anchors, anchor_valid=None, document_ids=None,
                position_ids=None):
        """Teacher-forced blocks at `anchors` [B, N], indices into the row -> DraftOutput. features
        [B, S, n d], input_ids [B, S]; document_ids [B, S] (-1: padding); position_ids [B, S] start
        anew in every document. Where anchor_valid is False the numbers mean nothing."""
        shape = (*input_ids.shape, self.fc.in_features)
        require(features.shape == shape, f"features must be {shape}, got {tuple(features.shape)}")
        hidden = self.backbone(features, input_ids, anchors, document_ids, position_ids)
        prev = self.previous_tokens(input_ids, anchors)
        rows = self.heads(hidden.flatten(0, 1), prev.flatten(0, 1))
        rows = (x if x is None else x.unflatten(0, anchors.shape) for x in rows)
        return DraftOutput(hidden, *rows)

    def propose(self, anchors, position, context, g, uniforms, filters=(0.0, 0, 1.0), top=0,
                greedy=True):
        """Draft g tokens for R requests: the backbone once, then the heads slot by slot -> Proposal

        anchors (token ids), position [R]; context: per layer cached keys, values [R, G, L, e],
        whose place is the position; uniforms [R, g]; filters: temperature, top_k, top_p; top > 0:
        walk the best candidates of each slot only, which is cheaper and as lossless."""
        slots = torch.arange(context[0][0].shape[2], device=anchors.device)[None]
        zero = torch.zeros_like(anchors)[:, None]  # every request is a row, so document 0
        block = (anchors[:, None], position[:, None], zero)
        states = self.run_blocks(*block, context, slots, zero)[:, 0]  # [R, K, d]
        first, markov, state, prev = self.config.first_slot, self.markov_head, None, anchors
        if first and markov is not None:  # slot 0 predicts nothing, but feeds the rnn
            state = markov.step(markov.markov_w1(prev), states[:, 0])[1]
        hidden = states[:, first : first + g]  # [R, g, d]
        base, rows = self.base_logits(hidden), [None] * g
        ids = self.draft_ids.expand(base.shape)  # [R, g, C]
        if 0 < top < base.shape[-1]:
            base, index = base.topk(top, dim=-1)
            ids = self.draft_ids[index]
            rows = rows if markov is None else markov.markov_w2.weight[index].unbind(1)  # [R, C, r]
        q, embeddings, tokens = None, [], []
        if filters[0] > 0:
            q = torch.zeros(*ids.shape[:2], len(self.embed_tokens), device=ids.device)  # [R, g, V]
        for k in range(g):
            logits = base[:, k]  # [R, C]
            if markov is not None:
                embeddings.append(markov.markov_w1(prev))  # [R, r]
                bias, state = markov.step(embeddings[k], hidden[:, k], state, rows[k])
                logits = logits + bias  # eq. 4
            if greedy:
                choice = logits.argmax(-1)  # [R]
                q_k = torch.ones_like(choice, dtype=torch.float32)[:, None]  # all mass on one id
            else:
                q_k = probabilities(logits, *filters)  # [R, C]
                choice = draw(q_k, uniforms[:, k])
            token = ids[:, k].gather(1, choice[:, None])  # [R, 1] target ids, for W1 and verify
            if q is not None:
                q[:, k].scatter_(1, token if greedy else ids[:, k], q_k)
            prev = token[:, 0]
            tokens.append(prev)
        confidence = self.confidence(hidden, torch.stack(embeddings, 1) if embeddings else None)
        return Proposal(torch.stack(tokens, 1), q, confidence, states)

    def save_pretrained(self, folder):
        """Write config.json and model.safetensors in speculators' format, which vLLM serves; says
        once what vLLM does not do with them. ValueError if a tensor is missing or misshapen."""
        config, ids, folder = self.config, self.draft_ids, pathlib.Path(folder)
        tensors = {**self.state_dict(), **{n + ".weight": getattr(self, n) for n in self.own}}
        if config.draft_vocab_size < config.vocab_size:
            tensors["lm_head.weight"] = self.lm_head
            tensors["d2t"] = ids - torch.arange(len(ids), device=ids.device)  # offsets
            tensors["t2d"] = torch.isin(torch.arange(config.vocab_size, device=ids.device), ids)
        self.check_tensors(tensors)
        folder.mkdir(parents=True, exist_ok=True)
        # Both files are complete under another name before either takes its place.
        weights, text = folder / "model.safetensors.tmp", folder / "config.json.tmp"
        save_file({k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}, weights)
        text.write_text(json.dumps(speculators_json(config), indent=2) + "\n")
        os.replace(weights, folder / "model.safetensors")
        os.replace(text, folder / "config.json")

    @classmethod
    def from_pretrained(cls, folder, target):
        """Load a draft of speculators, DeepSpec or z-lab from a folder or the hub (json and
        safetensors only), pair it with `target`, print one line about it. ValueError names missing
        or unexpected tensors and a target of other sizes. Its own embedding and head win."""
        try:
            raw, tensors = read_checkpoint(folder)
            config, line = read_config(raw, target)
            ids = torch.arange(config.draft_vocab_size) + tensors.get("d2t", 0)
            draft = cls(config, target, ids)
            draft.check_tensors(tensors)
        except Exception as error:  # files, hubs and their contents fail in many ways
            reason = str(error).split("\n")[0]
            raise ValueError(f"no draft in {folder}: expected a folder or hub id with config.json "
                             f"and model.safetensors that fit the target ({reason})") from error
        for name in ("embed_tokens", "lm_head"):
            ours = getattr(draft, name)
            theirs = tensors.get(name + ".weight", ours).to(ours)
            if not torch.equal(theirs, ours):
                setattr(draft, name, theirs)
                draft.own.append(name)
        draft.load_state_dict(tensors, strict=False)  # the rest was checked, and is in place
        print(f"draft {folder}: {line}")
        return draft

    def check_tensors(self, tensors):
        """Names and shapes, both ways: what is missing vLLM serves as uninitialised memory."""
        rows, few, d = len(self.target_head), len(self.draft_ids), self.config.hidden_size
        wanted, found = {**self.shapes}, {name: tuple(x.shape) for name, x in tensors.items()}
        needed = {*wanted, "lm_head.weight", "d2t"} if few < rows else {*wanted}
        wanted.update({"embed_tokens.weight": (rows, d), "lm_head.weight": (few, d), "d2t": (few,),
                       "t2d": (rows,)})
        missing, unexpected = sorted(needed - {*found}), sorted(found.items() - wanted.items())
        require(not missing and not unexpected, f"missing tensors {missing}, unexpected tensors "
                f"{unexpected}")

# -------------------------------------------------------------------- pairing and config.json
QWEN3_FIELDS = ("hidden_size intermediate_size num_hidden_layers num_attention_heads vocab_size "
                "num_key_value_heads head_dim rms_norm_eps max_position_embeddings").split()
DSPARK_FIELDS = ("mask_token_id block_size draft_vocab_size markov_rank markov_head_type "
                 "sample_from_anchor enable_confidence_head confidence_head_with_markov "
                 "sliding_window_non_causal").split()
ALL_FIELDS = [field.name for field in dataclasses.fields(DSparkConfig)]
DFLASH = dict(markov_rank=0, enable_confidence_head=False, sample_from_anchor=False,
              sliding_window_non_causal=False)
FORMATS = {  # speculators_model_type or architecture: name, and what its config.json leaves unsaid
    "dspark": ("speculators dspark", dict(sliding_window_non_causal=False)),
    "dflash": ("speculators dflash", DFLASH), "Qwen3DSparkModel": ("DeepSpec", {}),
    "DFlashDraftModel": ("z-lab", dict(DFLASH, block_size=16, sliding_window_from_slot=True))}
ASSUMED = dict(  # a draft that asks for anything else is refused by name
    hidden_act="silu", attention_bias=False, rope_type="default", type="default", is_causal=False,
    input_embedding_scale=1.0, output_multiplier=1.0, final_logit_softcapping=0)

def check_target(target):
    """-> the LM head's weight [V, d]. Training rebuilds logits as lm_head(last hidden state): a
    soft cap, a logit scale or a bias would break that silently, so it is tried on four tokens."""
    kind, head = type(target).__name__, target.get_output_embeddings().weight
    with torch.no_grad():
        ids = torch.arange(4, device=target.device)[None]
        out = target(input_ids=ids, output_hidden_states=True, use_cache=False)
        gap = F.linear(out.hidden_states[-1], head).float() - out.logits.float()
    require(gap.abs().max() <= 0.01 * out.logits.abs().max(), f"{kind}: logits are not lm_head(last"
            " hidden state); soft caps, logit scales and biased heads are not supported")
    return head

def flatten(raw):
    """A config.json of any format on one level; what is nested wins, null counts as absent."""
    flat = dict(raw)
    for part in ("dspark_extra", "speculators_config", "transformer_layer_config", "dflash_config",
                 "rope_scaling", "rope_parameters"):  # where rope_theta is since transformers 5
        flat.update(flat.get(part) or {})
    return {name: value for name, value in flat.items() if value is not None}

def name_of(target):
    return dict(name_or_path=target.config._name_or_path, architectures=[type(target).__name__])

def config_for(target, overrides):
    """The DSparkConfig of a fresh draft: the target's sizes, then the overrides."""
    source, rows = flatten(target.config.to_dict()), len(target.get_input_embeddings().weight)
    odd = {*overrides} - {*ALL_FIELDS}
    require(not odd, f"DSparkConfig has no fields {sorted(odd)}")
    lacks = {"num_hidden_layers", "num_attention_heads", "hidden_size"} - {*source}
    require(not lacks, f"{target.config.model_type}: its config.json has no {sorted(lacks)}")
    layers = source["num_hidden_layers"]
    fields = {"head_dim": source["hidden_size"] // source["num_attention_heads"]}
    fields.update((name, source[name]) for name in [*QWEN3_FIELDS, "rope_theta"] if name in source)
    fields.update(
        num_hidden_layers=3, num_target_layers=layers, vocab_size=rows, mask_token_id=rows - 1,
        target_layer_ids=sorted({1, layers // 2 - 1, layers - 4} & set(range(layers - 1))),
        verifier=name_of(target))
    return DSparkConfig(**{**fields, **overrides})

@functools.cache
def say_once(line):
    print(line)

def speculators_json(config):
    """config.json with every field written, since the loaders' defaults disagree. vLLM serves rank
    0 as "dflash" only; speculators reads any rank 0 as "dspark"."""
    rank, sliding = config.markov_rank, "sliding_attention" in config.layer_types
    dspark = rank or config.enable_confidence_head or config.sample_from_anchor
    kind = "dspark" if dspark else "dflash"
    if dspark and not (rank and config.markov_head_type == "vanilla"):
        say_once("note: vLLM does not serve this draft; it knows only the vanilla Markov head, and "
                 "with rank 0 neither a confidence head nor drafting from the anchor's slot")
    slot = {"sliding_window_from_slot": True} if config.sliding_window_from_slot else {}
    return {
        "architectures": ["DSparkDraftModel" if dspark else "DFlashDraftModel"],
        "speculators_model_type": kind, "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": kind, "default_proposal_method": "greedy", "verifier": config.verifier,
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": config.gamma}]},
        "transformer_layer_config": {
            "model_type": "qwen3", "hidden_act": "silu", "attention_bias": False,
            **{name: getattr(config, name) for name in QWEN3_FIELDS},
            "layer_types": config.layer_types, "use_sliding_window": sliding,
            "sliding_window": config.sliding_window or None,
            "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"}},
        "aux_hidden_state_layer_ids": [k + 1 for k in config.target_layer_ids],  # 0 = embeddings
        **{name: getattr(config, name) for name in DSPARK_FIELDS},
        "tie_word_embeddings": False, "dspark_extra": {**config.dspark_extra, **slot}}

def read_checkpoint(name):
    """-> config.json, tensors of a folder, else of a hub id, asked for once; no pickle, no code"""
    folder, tensors, patterns = pathlib.Path(name), {}, ["*.json", "*.safetensors"]
    if not folder.is_dir():
        folder = pathlib.Path(snapshot_download(str(name), allow_patterns=patterns, etag_timeout=5))
    raw = json.loads((folder / "config.json").read_text())
    for file in sorted(folder.glob("model*.safetensors")):  # one file, or shards
        tensors.update(load_file(file))
    return raw, tensors

def read_config(raw, target):
    """Any format -> DSparkConfig, checked against the target; a line that says what it is"""
    kind = raw.get("speculators_model_type") or (raw.get("architectures") or [None])[0]
    require(kind in FORMATS, f"config.json must be of {[*FORMATS]}, got {kind!r}")
    (name, unsaid), flat = FORMATS[kind], flatten(raw)
    odd = {key: flat[key] for key, value in ASSUMED.items() if flat.get(key, value) != value}
    require(not odd, f"drafts with {odd} are not supported")
    ids = flat.get("target_layer_ids", [k - 1 for k in flat.get("aux_hidden_state_layer_ids", [])])
    rows, width = target.get_input_embeddings().weight.shape
    layers, verifier = target.config.num_hidden_layers, flat.get("verifier", {})
    has = dict(vocab_size=rows, hidden_size=width, num_target_layers=layers)
    needs = {key: flat.get(key, has[key]) for key in has}
    require(needs == has and max(ids, default=0) < layers - 1, f"the draft, of "
            f"{verifier.get('name_or_path', 'another target')}, needs {needs}, reads layers {ids}; "
            f"{target.config._name_or_path} has {has}")
    if flat.get("is_causal") is False:  # z-lab's spelling
        flat["sliding_window_non_causal"] = True
    flat = {**unsaid, **flat, **has, "target_layer_ids": ids,
            "verifier": verifier or name_of(target)}
    config = DSparkConfig(**{key: flat[key] for key in ALL_FIELDS if key in flat})
    head = f"{config.markov_head_type} head" if config.markov_rank else "no Markov head"
    line = (f"{name} format, sample_from_anchor {config.sample_from_anchor} ("
            f"{config.gamma} drafts), {head}, target layers {ids} ({[k + 1 for k in ids]} by "
            "speculators' count)")
    causal = kind == "dflash" and raw.get("sliding_window_non_causal") is False
    return config, line + causal * "; its literal false makes all layers causal in vLLM"

# ------------------------------------------------ calibration (sec. 3.2.1) and scheduling (3.2.2)
def calibration_error(predicted, happened):
    """ECE over 20 equal-width bins: sum of n_b / N * |mean prediction - mean event|, in float64."""
    predicted = predicted.double().clamp(1e-8, 1 - 1e-8)
    gap = torch.zeros(20, dtype=torch.float64)
    gap.index_add_(0, (20 * predicted).long(), predicted - happened.double())
    return float(gap.abs().sum() / len(predicted))

def fit_sts(confidence_logits, accepted, grid=None, check=None):
    """Sequential Temperature Scaling: a temperature per draft position, from left to right.

    confidence_logits [N, gamma], accepted [N] drafts of full-block rounds -> temperatures [gamma].
    T_k is the value of the grid (0.25, 0.30 .. 4.00) with the least ECE of prod_{i<=k}
    sigmoid(logit_i / T_i) against "at least k were accepted", earlier T_i fixed. check: the same
    two of rounds not used for fitting; a T_k that lowers no error there becomes 1 before k + 1 is
    fitted, since T_{k+1} must fit the T_1 .. T_k that will be used."""
    grid, chosen = torch.arange(25, 401, 5).double() / 100 if grid is None else grid, []

    def error(temperature, logits, lengths):
        """Of the position after the chosen ones, with this temperature"""
        chain = torch.tensor([*chosen, temperature], dtype=torch.float64)
        survival = torch.sigmoid(logits[:, : len(chain)].double() / chain).prod(1)
        return calibration_error(survival, lengths >= len(chain))

    for _ in range(confidence_logits.shape[1]):
        best = min(grid.tolist(), key=lambda one: error(one, confidence_logits, accepted))
        if check and error(best, *check) >= error(1.0, *check):
            best = 1.0
        chosen.append(best)
    return torch.tensor(chosen, dtype=torch.float64)

def calibration_report(confidence_logits, accepted, temperatures):
    """Per position: ECE and AUC (probability that a surviving prefix was rated above a lost one;
    nan if all or none survived) of the survival prediction. [N, gamma], [N], [gamma] -> lists"""
    survival = torch.sigmoid(confidence_logits.double() / temperatures).cumprod(1)  # a_{r,j}
    report = {"ece": [], "auc": []}
    for k, predicted in enumerate(survival.T):
        lived, lost = predicted[accepted > k, None], predicted[accepted <= k]
        report["ece"].append(calibration_error(predicted, accepted > k))
        report["auc"].append(float(((lived > lost).double() + (lived == lost) / 2).mean()))
    return report

def schedule_prefixes(confidence, steps_per_second, stair_end=None):
    """Algorithm 1: how many drafts of each request to verify, so that tokens per second peak.

    confidence [R, gamma] = c_{r,j}; steps_per_second: int B -> SPS(B) -> lengths [R]. Lossless, as
    it stops at the first non-improvement (Appendix A): whether x_k is verified may not depend on
    x_k, but c_{k+1} does, through W1[x_k]. As a_{r,k+1} <= a_{r,k}, all that is ranked up to x_k,
    and so whether the stop comes before it, is known without x_k. A search over all lengths lets
    c_2 decide about x_1:
    with R = 1, SPS(1, 2, 3) = 1, 0.5, 0.45, tokens a and b with p = (0.7, 0.3) and q = (0.5, 0.5),
    c_1 = 0.8, c_2 = 0.9 after a and 0 after b, it verifies only after a, and a comes out with
    probability 0.5 + 0.5 * 0.7 = 0.85.

    stair_end (ours): int B -> the largest size that costs no more; once stopped, the next drafts
    in the ranking are taken up to it. Lossless too: where the stair ends is known from survivals
    up to that of the draft it stopped at, and none of them depends on that draft or a later one."""
    rows = len(confidence)
    survival = confidence.double().cumprod(1).T.flatten().tolist()  # a_{r,j} in the order (j, r)
    # Descending. Python's sort is stable, so ties go to the smaller j, then to the smaller r.
    ranked = sorted(range(len(survival)), key=survival.__getitem__, reverse=True)
    lengths, tau = [0] * rows, float(rows)  # each request's own token comes for free
    best = tau * steps_per_second(rows)
    for size, place in enumerate(ranked, rows + 1):  # B, were this draft admitted as well
        tau += survival[place]
        throughput = tau * steps_per_second(size)  # Theta = tau * SPS(B)
        if survival[place] == 0 or not throughput > best:
            break  # the first that does not improve it, or that cannot be accepted
        best = throughput
        lengths[place % rows] += 1
    taken = sum(lengths)
    free = stair_end(rows + taken) - rows if stair_end else taken
    for place in ranked[taken:free]:
        lengths[place % rows] += survival[place] > 0
    return torch.tensor(lengths)  # l_r

class DraftLimit:
    """How many drafts a request gets at most, 0..gamma. Algorithm 1 takes the drafts, and what they
    cost, as given, and a smooth cost; a weak draft or a full batch can lose, and real costs have
    steps. So a moving average over past rounds (of 64 requests' rounds, and of 8 or more of the
    loop) says which share of the drafts survives to each position, hence how many tokens a limit
    would give for the measured seconds of a round in which every request gets so many. The best
    limit holds, but for a whole block after 16 rounds, then 32, 64, 128, to look again; to draft
    less takes a quarter of the memory filled, to stop all of it and 3 % of gain. One request that
    stopped takes long to start again: a look counts as 1 of 64. The past alone decides, so the
    text is the target's (as with the budget of sec. 5.2); times come from tables, so runs can be
    repeated."""
    def __init__(self, gamma, step_seconds, draft_seconds, requests):
        self.gamma, self.step_seconds, self.draft_seconds = gamma, step_seconds, draft_seconds
        self.memory, self.seen, self.survival = max(8, 64 // requests), [0] * gamma, [0.0] * gamma
        self.below, self.patience = 0, 16  # rounds below gamma in turn

    def rate(self, rows, drafts):
        """Tokens per second and request, were so many drafts of each request verified"""
        seconds = self.step_seconds(rows * (1 + drafts))
        if drafts == 0:
            return 0.97 / seconds  # within chance, drafting goes on
        tokens = 1 + sum(itertools.accumulate(self.survival[:drafts], min))
        return tokens / (seconds + self.draft_seconds(rows))

    def choose(self, rows):
        best = max(range(1 + self.gamma), key=functools.partial(self.rate, rows))
        known = self.seen[0] if best == 0 else 4 * min(self.seen)
        if best == self.gamma or known < self.memory:
            self.below, self.patience = 0, 16
            return self.gamma
        self.below = (self.below + 1) % self.patience
        if self.below == 0:
            self.patience = min(2 * self.patience, 128)
        return best if self.below else self.gamma

    def record(self, confidence, lengths, accepted):
        """After a round with drafts, lists over the requests (confidence of lists over the drafts):
        what was verified counts as it came out, what was not as the confidence says."""
        for j in range(len(confidence[0])):
            share = statistics.fmean(
                (hits > j) if length > j else (hits == length) * math.prod(trust[length : j + 1])
                for trust, length, hits in zip(confidence, lengths, accepted))
            self.seen[j] = min(self.seen[j] + 1, self.memory)
            self.survival[j] += (share - self.survival[j]) / self.seen[j]

def choose_lengths(schedule, confidence, g, rows, steps_per_second, draft_seconds):
    """The schedule's decision, R lengths in a list; made, and cut, before the target runs."""
    if confidence is None or schedule == "full" or isinstance(schedule, int):
        return [g] * rows
    if schedule == "prefix":  # a round takes the drafting and the target's step
        drafting = draft_seconds(rows) if draft_seconds else 0.0
        lengths = schedule_prefixes(
            confidence, lambda size: 1 / (drafting + 1 / steps_per_second(size)),
            getattr(steps_per_second, "stair_end", None))
    elif callable(schedule):
        lengths = torch.as_tensor(schedule(confidence))
    else:  # a threshold: the first slot below it ends the prefix
        lengths = (confidence >= schedule).long().cumprod(1).sum(1)
    return lengths.clamp(0, g).tolist()

# ------------------------------------------------------- packed target and cache (sec. 5.3)
class Plan:
    """Where the tokens of one packed forward belong: request i sends counts[i] of them, from
    position starts[i] on, into cache row low + i. row, position [T]: of each token; for attention
    alone also padded: grid [R, longest] of indices into T, the tokens in its `cells`."""
    def __init__(self, low, starts, counts, device):
        start, count = (torch.tensor(x)[:, None] for x in (starts, counts))
        cell = torch.arange(max(counts)).expand(len(counts), -1)  # [R, longest]
        real = cell < count
        grid = real.flatten().cumsum(0).sub(1).view_as(real)
        tensors = (*real.nonzero(as_tuple=True), grid, start + cell)  # all made on the host, so
        request, offset, self.grid, self.cell_position = (x.to(device) for x in tensors)  # no wait
        self.cells = request, offset  # [T], [T]
        self.row, self.position = low + request, self.cell_position[self.cells]
        self.low, self.high, self.even = low, low + len(counts), len({*counts}) == 1
        self.length, self.biases = max(a + b for a, b in zip(starts, counts)), {}

    def unpack(self, x):
        """[T, ...] -> [R, longest, ...]; a view where all requests send as many."""
        return x.unflatten(0, self.grid.shape) if self.even else x[self.grid]

    def pack(self, out):
        """The reverse, without the padding: [R, longest, ...] -> [T, ...]"""
        return out.flatten(0, 1) if self.even else out[self.cells]

    def bias(self, fold, dtype, window):
        """Each token sees its own request up to itself; made once per forward, not per layer."""
        key = fold, dtype, window
        if key not in self.biases:
            slot = torch.arange(self.length, device=self.row.device)
            mask = slot <= self.cell_position[..., None]  # [R, longest, L]
            if window:
                mask &= slot > self.cell_position[..., None] - window
            self.biases[key] = fold_mask(mask, fold, dtype)
        return self.biases[key]

class RaggedCache:
    """Keys and values [rows, G, places, e] per layer, of target and draft, and the states that the
    draft reads; the place IS the position. Rolling back is not writing: what lies beyond the
    committed tokens is never visible and gets overwritten."""
    def __init__(self, rows, slots):
        self.rows, self.slots, self.layers, self.plan = rows, slots, {}, None

    def update(self, key, value, layer_idx, cache_kwargs=None, kwargs=None):
        """Store packed [1, G, T, e]; Hugging Face's layers call this -> views [R, G, L, e]"""
        plan = self.plan
        self.write(layer_idx, plan.row, plan.position, key[0], value[0])
        return [store[plan.low : plan.high, :, : plan.length] for store in self.layers[layer_idx]]

    def write(self, name, row, position, *tensors):
        """row, position [T] of the tensors [G, T, e]"""
        if name not in self.layers:
            self.layers[name] = [
                x.new_zeros(self.rows, len(x), self.slots, x.shape[2]) for x in tensors]
        for store, new in zip(self.layers[name], tensors):
            store[row, :, position] = new.transpose(0, 1)  # [T, G, e]

    def move(self, source, to):
        for store in sum(self.layers.values(), []):
            store[to] = store[source]

def packed_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0,
                     sliding_window=None, plan=None, **kwargs):
    """Attention function for Hugging Face models; un-packs queries just for the score product.
    query [1, H, T, e]; key, value [R, G, L, e] as the cache returned them -> [1, T, H, e]"""
    given = {**kwargs, "attention_mask": attention_mask}  # a model's own mask would be lost
    unknown = {name for name, value in given.items() if value is not None} - NOT_FOR_ATTENTION
    require(plan and not unknown, f"{type(module).__name__}: packed attention has no "
            f"{sorted(unknown) or 'plan: the model does not pass it on'}")
    bias = plan.bias(query.shape[1] // key.shape[1], query.dtype, sliding_window)
    query = plan.unpack(query[0].transpose(0, 1)).transpose(1, 2)  # [R, H, longest, e]
    out = attend(query, key, value, bias, scaling or query.shape[-1] ** -0.5)
    return plan.pack(out.transpose(1, 2))[None], None  # [1, T, H, e]

NOT_FOR_ATTENTION = set("position_ids cache past_key_values use_cache cache_position is_causal "
                        "output_hidden_states output_attentions output_router_logits".split())
AttentionInterface.register("dspark_packed", packed_attention)

@contextlib.contextmanager
def packed(target):
    """Run the target in eval mode with packed attention and our `linear`; leave it as it was."""
    before, training = target.config._attn_implementation, target.training
    plain = [part for part in target.modules() if type(part) is nn.Linear
             and "forward" not in vars(part)]
    target.eval().set_attn_implementation("dspark_packed")
    for part in plain:
        part.forward = functools.partial(linear, weight=part.weight, bias=part.bias)
    try:
        yield
    finally:
        for part in plain:
            del part.forward
        target.set_attn_implementation(before)
        target.train(training)

def run_target(target, cache, layer_ids, tokens, plan, keep=0):
    """One packed forward of a causal LM, whose layers must pass keywords on to their attention:
    tokens [T] -> logits [T, V] (of the rows in keep; 0: all), features [T, n d], the outputs of
    layer_ids (None without any)"""
    cache.plan = plan
    name = "cache" if "cache" in inspect.signature(target.forward).parameters else "past_key_values"
    out = target(input_ids=tokens[None], position_ids=plan.position[None], logits_to_keep=keep,
                 use_cache=True, output_hidden_states=bool(layer_ids), plan=plan, **{name: cache})
    states = [out.hidden_states[k + 1][0] for k in layer_ids]
    return out.logits[0], torch.cat(states, -1) if states else None

# ------------------------------------------------------------------------------------- generate
# One round as on_round sees it; lists over the live requests (requests: their Generations), and the
# draft's hidden [R, K, d] (None without drafts).
Round = namedtuple("Round", "requests anchors drafts lengths confidence confidence_logits accepted "
                   "next_tokens hidden")
PREFILL_CELLS = 1024  # of a group of prompts that join together, padded to the longest of them

def ratio(part, whole):
    return part / whole if whole else math.nan

class Generation:
    """One request: its text, and per round how many drafts were verified and accepted."""
    def __init__(self, index, prompt, budget, gamma):
        self.index, self.prompt, self.budget, self.gamma = index, prompt, budget, gamma
        self.tokens, self.origins = [], []  # origin: first, draft, correction or bonus
        self.lengths, self.accepts = [], []  # per round; accepts before the cut at a stop or budget
        self.drafted, self.done = 0, budget == 0
        self.projected = 0  # positions whose target states the draft has as keys and values

    rounds = property(lambda self: len(self.lengths))  # target forwards, the prefill not counted
    verified = property(lambda self: sum(self.lengths))
    accepted = property(lambda self: sum(self.accepts))
    accepted_length = property(lambda self: 1 + ratio(self.accepted, self.rounds))  # tau

    @property
    def acceptance_by_position(self):
        """[gamma] share of rounds in which at least k drafts were accepted, as vLLM counts."""
        return [ratio(sum(a > k for a in self.accepts), self.rounds) for k in range(self.gamma)]

    @property
    def conditional_acceptance(self):
        """[gamma] acceptance of draft k where it was verified and those before it accepted."""
        pairs = [*zip(self.lengths, self.accepts)]
        hits = [[a > k for n, a in pairs if min(n, a + 1) > k] for k in range(self.gamma)]
        return [ratio(sum(hit), len(hit)) for hit in hits]

    def commit(self, drafts, token, origin, stops):
        """Append accepted drafts and the target's own token; cut at a stop token or the budget."""
        for new, source in [*((draft, "draft") for draft in drafts), (token, origin)]:
            self.tokens.append(new)
            self.origins.append(source)
            self.done = new in stops or len(self.tokens) == self.budget
            if self.done:
                break

def total(generations):
    """The counters of many requests in one Generation."""
    whole = Generation(-1, [], 0, max((one.gamma for one in generations), default=0))
    for one in generations:
        whole.lengths += one.lengths
        whole.accepts += one.accepts
        whole.drafted += one.drafted
    return whole

def check_request(target, draft, prompts, max_new_tokens, schedule, sampling):
    """What `generate` refuses, by name. -> prompts as lists, drafts per round"""
    temperature, top_k, top_p, top, way = sampling
    rows, config = len(target.get_input_embeddings().weight), target.config
    limit = getattr(config, "max_position_embeddings", math.inf)
    layers = {*(getattr(config, "layer_types", None) or ())}
    kind, window = type(target).__name__, getattr(config, "sliding_window", None) or limit
    require(layers <= {"full_attention", "sliding_attention"} and config.model_type != "rwkv",
            f"{kind}: only full and sliding attention can be rolled back")
    require(config.model_type not in ("phimoe", "qwen2_moe") or window >= limit,
            f"{kind} hides its sliding window from the attention function, so it is not supported")
    gamma, whole = draft.config.gamma if draft else 0, type(schedule) is int
    require(min(temperature, top_k, top) >= 0 and 0 < top_p <= 1 and way in ("sample", "argmax"),
            "expected temperature, top_k, markov_top_k >= 0, 0 < top_p <= 1, draft_sampling sample "
            f"or argmax, got {sampling}")
    require(type(max_new_tokens) is int and max_new_tokens >= 0,
            f"max_new_tokens must be an int >= 0, got {max_new_tokens!r}")
    fits = callable(schedule) or schedule in ("full", "prefix")
    fits |= whole and 0 <= schedule <= (gamma or schedule)
    fits |= type(schedule) is float and 0 <= schedule <= 1
    require(fits, f"schedule must be 'full', 'prefix', an int in 0..{gamma}, a float in [0, 1] or "
            f"a callable, got {schedule!r}")
    if draft:
        theirs = len(draft.embed_tokens)
        require(theirs == rows, f"the draft's target has {theirs} token ids, this one {rows}")
        require(draft.confidence_head is not None or whole or schedule == "full",
                f"schedule {schedule!r} needs a draft with a confidence head")
    prompts = [prompt.tolist() if torch.is_tensor(prompt) else numpy.asarray(prompt).tolist()
               for prompt in prompts]
    for i, prompt in enumerate(prompts):
        ids = type(prompt) is list and {*map(type, prompt)} == {int}
        require(ids and min(prompt) >= 0 and max(prompt) < rows,
                f"prompt {i} must be token ids below {rows}, got {prompt}")
        require(len(prompt) + max_new_tokens + gamma <= limit, f"prompt {i}: {len(prompt)} tokens, "
                f"{max_new_tokens} new, {gamma} drafts exceed max_position_embeddings {limit}")
    return prompts, schedule if whole and draft else gamma

def draft_for(draft, cache, live, anchors, starts, g, *options):
    """g drafts for each live request, the anchor [R] being token starts[r] -> Proposal

    First the target states that came since a request last drafted become the draft's own keys and
    values: here, not after each target forward, so rounds without drafts project nothing."""
    old = [one.projected for one in live]
    cache.plan = plan = Plan(0, old, [b - a for a, b in zip(old, starts)], anchors.device)
    features = cache.layers["features"][0][plan.row, 0, plan.position]  # [T, n d]
    pairs = draft.context_keys_values(features[None], plan.position[None])
    context = [cache.update(*pair, f"draft {layer}") for layer, pair in enumerate(pairs)]
    for one, start in zip(live, starts):
        one.projected = start
    position = torch.tensor(starts, device=anchors.device)
    return draft.propose(anchors, position, context, g, *options)

@torch.inference_mode()
def generate(target, draft, prompts, max_new_tokens, temperature=0.0, top_k=0, top_p=1.0,
             stop_token_ids=(), schedule="full", steps_per_second=None, draft_seconds=None,
             max_concurrency=None, markov_top_k=0, draft_sampling="sample", generator=None,
             on_round=None):
    """Decode all prompts, batched and lossless -> one Generation per prompt, in order. draft=None
    is plain decoding by the same lines. ValueError for bad input; the target is left as found.

    prompts: 1-D LongTensors or lists. schedule: "full"; an int, drafts per round (0: plain); a
    float, threshold on c_k; "prefix", Algorithm 1; or a callable confidence [R, gamma] -> lengths,
    lossless only if whether x_k is kept depends on no c after c_k (schedule_prefixes says why).
    "prefix" takes the costs of this machine: steps_per_second(B) and draft_seconds(R). With both it
    also drafts less, or not at all, where that pays (DraftLimit); without draft_seconds drafts
    count as free; without either both are measured first, and only then is a clock read.
    max_concurrency requests run at once, others join as places become free, an eighth of all at a
    time. generator: of all random numbers, else torch's own. markov_top_k: walk only so many
    candidates. draft_sampling "argmax": greedy proposals, one-hot q. on_round(Round) is called
    after each round."""
    filters, sampling = (temperature, top_k, top_p), (markov_top_k, draft_sampling)
    prompts, g = check_request(target, draft, prompts, max_new_tokens, schedule, filters + sampling)
    draft = draft if g else None
    greedy_draft = temperature == 0 or draft_sampling == "argmax"
    layer_ids = draft.config.target_layer_ids if draft else ()
    several = hasattr(stop_token_ids, "__len__")
    stops = {*map(int, stop_token_ids if several else {stop_token_ids} - {None})}
    device, slots = target.device, max(map(len, prompts), default=0) + max_new_tokens + g
    requests = [Generation(i, prompt, max_new_tokens, g) for i, prompt in enumerate(prompts)]
    waiting, live, joined = deque(one for one in requests if not one.done), [], []
    require(max_concurrency is None or max_concurrency > 0, f"max_concurrency {max_concurrency}")
    rows = min(max_concurrency or len(prompts), len(prompts))
    cache = RaggedCache(rows, slots)
    limit = None
    if schedule == "prefix" and draft and rows:
        if steps_per_second is None:  # the one case in which a clock is read
            steps_per_second = profile_steps_per_second(target, rows, g)
            draft_seconds = draft_seconds or profile_draft_seconds(
                target, draft, rows, temperature=temperature, markov_top_k=markov_top_k).seconds
        if draft_seconds:
            stairs = getattr(steps_per_second, "stairs", lambda size: 1 / steps_per_second(size))
            limit = DraftLimit(g, stairs, draft_seconds, rows)

    generator = generator or torch.default_generator
    noise = dict(dtype=torch.float64, generator=generator, device=generator.device)

    def run(tokens, plan, keep=0):
        """Target distributions, or argmax; the states the draft reads are stored."""
        logits, features = run_target(target, cache, layer_ids, tokens, plan, keep)
        if layer_ids:
            cache.write("features", plan.row, plan.position, features[None])
        return logits.argmax(-1) if temperature == 0 else probabilities(logits, *filters)

    with packed(target):
        while waiting or live:
            # 1. Admit prompts once an eighth of the rows is free, as together they cost less, and
            # then until none is; the prefill gives a first token each.
            free = rows - len(live)
            admits = joined or free >= min(rows // 8, len(waiting))
            joined = []
            while admits and waiting and len(joined) < free:
                counts = [len(one.prompt) for one in (*joined, waiting[0])]
                if joined and len(counts) * max(counts) > PREFILL_CELLS:
                    break
                joined.append(waiting.popleft())
            if joined:
                counts = [len(one.prompt) for one in joined]
                plan = Plan(len(live), [0] * len(joined), counts, device)
                ids = torch.tensor(sum((one.prompt for one in joined), []), device=device)
                p = run(ids, plan, torch.tensor(counts, device=device).cumsum(0) - 1)  # [R, V]
                first = p if temperature == 0 else draw(p, torch.rand(len(p), **noise).to(device))
                for one, token in zip(joined, first.tolist()):
                    one.commit([], token, "first", stops)
                live += joined
            else:
                # 2. Draft for every live request.
                anchors = torch.tensor([one.tokens[-1] for one in live], device=device)  # [R]
                starts = [len(one.prompt) + len(one.tokens) - 1 for one in live]
                u = torch.rand(len(live), 2 * g + 1, **noise).to(device)
                drafts, q, trust_logits, hidden = anchors.new_zeros(len(live), 0), None, None, None
                most = limit.choose(len(live)) if limit else g
                if most:
                    drafts, q, trust_logits, hidden = draft_for(
                        draft, cache, live, anchors, starts, most, u[:, g + 1 :], filters,
                        markov_top_k, greedy_draft)
                trust = trust_logits is not None
                confidence = draft.calibrated(trust_logits, temperature) if trust else None
                # 3. Schedule: what to verify is decided, and cut, before the target runs.
                lengths = choose_lengths(schedule, confidence, most, len(live), steps_per_second,
                                         draft_seconds)
                # 4. Verify: one packed row of exactly R + sum(l_r) tokens.
                plan = Plan(0, starts, [1 + length for length in lengths], device)
                kept, wide = torch.tensor(lengths, device=device), max(lengths)
                sent = plan.pack(torch.cat([anchors[:, None], drafts[:, :wide]], 1))  # [T]
                p = plan.unpack(run(sent, plan))  # [R, wide + 1, V]
                # 5. Accept and commit, after one copy to the host.
                q = p if q is None else q[:, :wide]  # unused without drafts or when greedy
                accepted, token = accept(drafts[:, :wide], kept, q, p, u[:, : wide + 1])
                table = torch.cat([accepted[:, None], token[:, None], drafts], 1).tolist()
                for one, length, (count, new, *block) in zip(live, lengths, table):
                    one.lengths.append(length)
                    one.accepts.append(count)
                    one.drafted += len(block)
                    origin = "bonus" if count == length else "correction"
                    one.commit(block[:count], new, origin, stops)
                if limit and most:
                    limit.record(confidence.tolist(), lengths, [row[0] for row in table])
                if on_round:
                    trusts = (x.tolist() if trust else None for x in (confidence, trust_logits))
                    on_round(Round([*live], anchors.tolist(), drafts.tolist(), lengths, *trusts,
                                   accepted.tolist(), token.tolist(), hidden))
            # 6. Leave: the last live request moves into the row of one that is done.
            for row in reversed(range(len(live))):
                if live[row].done:
                    cache.move(len(live) - 1, row)
                    live[row] = live[-1]
                    live.pop()
    return requests

@contextlib.contextmanager
def stopwatch(target):
    """Seconds of a `with` block: all, target (its forwards), prefill (its forwards of prompts)."""
    seconds = dict.fromkeys(("all", "target", "prefill"), 0.0)

    def tick(name, sign):
        if target.device.type == "cuda":
            torch.cuda.synchronize()
        seconds[name] += sign * time.perf_counter()

    def hook(module, args, kwargs, *output):  # before a forward, and after it
        prefill = torch.is_tensor(kwargs["logits_to_keep"])
        tick("prefill" if prefill else "target", 1 if output else -1)

    hooks = [target.register_forward_pre_hook(hook, with_kwargs=True),
             target.register_forward_hook(hook, with_kwargs=True)]
    tick("all", -1)
    try:
        yield seconds
    finally:
        tick("all", 1)
        for one in hooks:
            one.remove()

# ----------------------------------------------------------- cost tables, measured (sec. 3.2.2)
class StepCosts:
    """Seconds of a step by its size, measured: forwards of B tokens, or drafting for R requests.

    Algorithm 1 gets the greatest convex, rising curve below the points from `low` = R on: with
    convex step times throughput has a single peak, which the early stop finds; the stairs of real
    tables would end the search at the first of them. Straight lines between and beyond points."""
    def __init__(self, sizes, measured, low=1):
        self.sizes, self.measured, self.low = [*sizes], [*measured], low
        require(len(sizes) == len(measured) > 0 < min(measured) and [*sizes] == sorted({*sizes}),
                f"StepCosts expects ascending sizes, positive seconds, got {sizes}, {measured}")
        # A smaller step costs no more.
        self.rising = [*itertools.accumulate(reversed(measured), min)][::-1]
        points = [*zip(sizes, self.rising)]
        hull = [point for point in points if point[0] <= low] or points[:1]
        while hull[-1] != points[-1]:  # on to the point with the least slope
            further = points[points.index(hull[-1]) + 1 :]
            hull.append(min(further, key=functools.partial(slope, hull[-1])))
        self.table = numpy.interp(range(sizes[-1] + 1), *zip(*hull)).tolist()
        self.fitted = [self.table[size] for size in sizes]
        self.last_slope = slope(*hull[-2:]) if len(hull) > 1 else 0.0

    def seconds(self, size):
        beyond = max(0, size - self.sizes[-1])
        return self.table[size - beyond] + beyond * self.last_slope

    def __call__(self, size):
        """SPS(B), steps per second."""
        return 1 / self.seconds(size)

    def stairs(self, size):
        """Seconds of the next measured size, for decisions that need no convex curve: kernels work
        in tiles, so a size between two measured ones costs more than the line between them. Below
        `low`, where measured sizes lie far apart, and beyond the last: on the line."""
        if not self.low <= size <= self.sizes[-1]:
            return self.seconds(size)
        return self.rising[bisect.bisect_left(self.sizes, size)]

    def stair_end(self, size):
        """The largest size that costs no more than this one, by `stairs`"""
        return max(size, self.sizes[bisect.bisect_right(self.rising, self.stairs(size)) - 1])

    def __str__(self):
        rows = [f"{size:6}{1e3 * seen:12.2f}{1e3 * fit:12.2f}"
                for size, seen, fit in zip(self.sizes, self.measured, self.fitted)]
        growth = self.fitted[-1] / self.fitted[0]
        words = f"the largest step costs {growth:.1f} times the smallest"
        if growth < 1.2:
            words = f"flat: {words}, so verifying everything is nearly free"
        return "\n".join(["  size measured ms   fitted ms", *rows, words])

def slope(start, end):
    return (end[1] - start[1]) / (end[0] - start[0])

def median_seconds(step, sizes, repeats):
    """step(size) returns its seconds -> medians of `repeats` passes over the sizes after a warm-up;
    of fewer, but at least 3, where that takes more than 10 seconds."""
    step(sizes[-1])
    passes = []
    while len(passes) < min(3, repeats) or len(passes) < repeats and sum(map(sum, passes)) < 10:
        passes.append([step(size) for size in sizes])
    return [statistics.median(times) for times in zip(*passes)]

@torch.inference_mode()
def profile_steps_per_second(target, requests=1, gamma=7, context=128, repeats=7):
    """Time packed forwards of R, 1.5 R, 2 R, ... (1 + gamma) R tokens of R requests, and of 1, 2,
    3, 4, 6, 8, 12, ... of as many, `context` cached ones before each -> StepCosts, a callable
    B -> SPS(B). Top-k and top-p of the target's distributions are not in these times."""
    cache = RaggedCache(requests, context + 1 + gamma)

    def step(size):
        rows = min(size, requests)
        counts = [(size + row) // rows for row in range(rows)]  # as even as can be
        plan = Plan(0, [context] * rows, counts, target.device)
        tokens = torch.zeros(size, dtype=torch.long, device=target.device)
        with stopwatch(target) as seconds:
            run_target(target, cache, (), tokens, plan)
        return seconds["all"]

    with packed(target):
        powers = [2**i for i in range(requests.bit_length())]  # while fewer requests are left
        fewer = {size for size in (*powers, *(3 * power for power in powers)) if size < requests}
        sizes = sorted(fewer | {requests * k // 2 for k in range(2, 3 + 2 * gamma)})
        return StepCosts(sizes, median_seconds(step, sizes, repeats), requests)

@torch.inference_mode()
def profile_draft_seconds(target, draft, requests=1, repeats=7, temperature=0.0, markov_top_k=0,
                          context=128):
    """Time drafting a block for one request and for R, with `context` positions cached, two of them
    new -> StepCosts over R, for its `seconds`"""
    gamma, device = draft.config.gamma, draft.draft_ids.device
    cache, sizes = RaggedCache(requests, context), sorted({1, requests})
    zero = torch.zeros(1, dtype=torch.long, device=device)
    cache.write("features", zero, zero, draft.fc.weight.new_zeros(1, 1, draft.fc.in_features))

    def step(rows):
        live = [Generation(row, [], 1, gamma) for row in range(rows)]
        for one in live:
            one.projected = context - 2
        noise = torch.full((rows, gamma), 0.5, device=device)  # no random number is used up
        with stopwatch(target) as seconds:
            draft_for(draft, cache, live, zero.expand(rows), [context] * rows, gamma, noise,
                      (temperature, 0, 1.0), markov_top_k, temperature == 0)
        return seconds["all"]

    return StepCosts(sizes, median_seconds(step, sizes, repeats))

# ------------------------------------------------------------------- try it: python dspark.py
def main():
    """Figure 1 in text: a tiny random target and draft, one round after another."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    target = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=6, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512))
    draft = DSparkDraft.from_target(target, num_hidden_layers=1, block_size=5, markov_rank=8)
    prompt = torch.randint(0, 95, (1, 8))

    def show(round):
        (kept,), (hits,) = round.lengths, round.accepted
        fates = ["accepted"] * hits + ["rejected"] * (kept - hits) + ["dropped"] * (5 - kept)
        cells = [f"{token:2} ({trust:.2f}) {fate:8}" for token, trust, fate in zip(
            round.drafts[0], round.confidence[0], fates)]
        print(f"anchor {round.anchors[0]:2} | {' | '.join(cells)} | then {round.next_tokens[0]:2}")

    print("Temperature 1, untrained models. Drafts as: token (confidence) fate")
    generate(target, draft, prompt, 24, temperature=1.0, schedule=0.66, on_round=show,
             generator=torch.Generator().manual_seed(1))
    fast, plain = (generate(target, one, prompt, 48)[0] for one in (draft, None))
    print(f"Temperature 0, same text as plain decoding: {fast.tokens == plain.tokens}")

if __name__ == "__main__":
    main()
