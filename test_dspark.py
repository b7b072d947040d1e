"""What dspark.py and train.py claim, in the order of the code. Offline, on CPU, under a minute.

Targets are tiny and random, drafts untrained or built to be right about half the time. "Pitfall n"
in a docstring is an entry of the list of faults at the end of this file: reports about other
implementations of this method, each with the test that guards against it here. Reference numbers
in testdata/fixtures come from running the public libraries (see the README there).
"""
import collections
import contextlib
import functools
import itertools
import json
import math
import pathlib

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file

import dspark
from dspark import (MARKOV_HEADS, DSparkConfig, DSparkDraft, Stopwatch, VanillaHead, accept, draw,
                    generate, probabilities, schedule_prefixes, total, verify, visibility)

torch.set_num_threads(2)
DATA = pathlib.Path(__file__).parent / "testdata" / "fixtures"
CASES = json.loads((DATA / "cases.json").read_text())["cases"]
CLOSE = dict(rtol=0, atol=2e-5)  # float32, logits of order one
V, GAMMA = 61, 4

# ---------------------------------------------------------------------- models, drafts, references

FAMILIES = {
    "qwen3": ("Qwen3", dict(head_dim=16)),  # heads * head_dim = 64, not the hidden size
    "llama": ("Llama", {}),
    "mistral": ("Mistral", dict(sliding_window=5)),
    "qwen2": ("Qwen2", dict(use_sliding_window=True, sliding_window=5, max_window_layers=2)),
}

@functools.cache
def make_target(family="qwen3", vocab=V, seed=0, mixing=0.02):
    """A random causal LM. `mixing` scales what its layers add to the embedding: where it is small,
    the next token follows from the last one alone, and `guess_half` guesses well."""
    kind, extra = FAMILIES[family]
    config = getattr(transformers, kind + "Config")(
        vocab_size=vocab, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        initializer_range=0.3, bos_token_id=None, eos_token_id=None, pad_token_id=None, **extra)
    torch.manual_seed(seed)
    target = getattr(transformers, kind + "ForCausalLM")(config).eval()
    for name, weight in target.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            weight.data *= mixing
    return target

def make_draft(target, seed=1, **overrides):
    """An untrained draft in which every tensor matters."""
    torch.manual_seed(seed)
    sizes = dict(num_hidden_layers=2, block_size=GAMMA, markov_rank=6, target_layer_ids=[0, 2])
    draft = DSparkDraft.from_target(target, **{**sizes, **overrides})
    for weight in draft.parameters():
        noise = torch.randn_like(weight)
        weight.data = 0.25 * noise if weight.dim() > 1 else weight.data + 0.2 * noise
    return draft

def guess_half(target, **overrides):
    """A draft that knows which token follows which: W1 and W2 are the target's embedding and head."""
    draft = make_draft(target, markov_rank=32, **overrides)
    weights = dict(draft.named_parameters())
    embedding = target.get_input_embeddings().weight.data
    scale = embedding.pow(2).mean(-1, keepdim=True).rsqrt()
    weights["markov_head.markov_w1.weight"].data = embedding * scale
    weights["markov_head.markov_w2.weight"].data = target.get_output_embeddings().weight.data.clone()
    weights["norm.weight"].data *= 0.3  # the backbone disturbs it a little
    return draft

HEADS = {"vanilla": {}, "gated": dict(markov_head_type="gated"), "rnn": dict(markov_head_type="rnn"),
         "none": dict(markov_rank=0, confidence_head_with_markov=False)}
DRAFT_IDS = [i for i in range(V) if i % 3 != 1]  # a mapping that is no shift

def make_prompts(count, seed=3, vocab=V):
    """Ragged: 1 to 7 tokens."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab, (1 + (5 * i) % 7,), generator=g).tolist() for i in range(count)]

def texts(generations):
    return [one.tokens for one in generations]

@torch.no_grad()
def states_of(target, ids, layer_ids=(0, 2)):
    """-> features [1, S, n d], last hidden state [1, S, d], logits [1, S, V], by Hugging Face"""
    out = target(torch.as_tensor(ids)[None], output_hidden_states=True)
    features = torch.cat([out.hidden_states[k + 1] for k in layer_ids], -1)
    return features, out.hidden_states[-1], out.logits

def ragged(confidence):
    """A schedule that changes from round to round, with rounds of length 0."""
    rows, gamma = confidence.shape
    return (torch.arange(rows) * 3 + int(confidence.sum() * 1e4)) % (gamma + 1)

def cost(tokens):
    """Steps per second of a made-up target: step time is convex in the tokens."""
    return 1 / (1 + 0.02 * tokens + 0.002 * tokens**2)

# --------------------------------------------------------------------------------- configuration

@pytest.mark.parametrize("overrides, words", [
    (dict(mask_token_id=V), "mask_token_id"), (dict(mask_token_id=-1), "mask_token_id"),
    (dict(markov_rank=0), "--no-confidence-head-with-markov"), (dict(markov_rank=-1), "markov_rank"),
    (dict(markov_head_type="lstm"), "lstm"), (dict(target_layer_ids=[1, 3]), "final norm"),
    (dict(target_layer_ids=[2, 0]), "target_layer_ids"), (dict(target_layer_ids=[]), "layer_ids"),
    (dict(block_size=1), "block_size"), (dict(draft_vocab_size=V + 1), "draft_vocab_size"),
    (dict(no_such_field=1), "no_such_field"), (dict(draft_ids=[3, 2]), "draft_ids")])
def test_values_that_cannot_work_are_refused_by_name(overrides, words):
    """Pitfalls 5 (the last layer's output), 14 (mask token), 38 (rank 0 and the confidence head)."""
    with pytest.raises(ValueError, match=words):
        make_draft(make_target(), **overrides)

def test_gamma_counts_the_slots_that_predict():
    target = make_target()
    assert make_draft(target).config.gamma == 4
    assert make_draft(target, sample_from_anchor=False).config.gamma == 3

@pytest.mark.parametrize("kind, sizes", [
    ("Gemma2", dict(head_dim=8)), ("Granite", dict(logits_scaling=4.0))])
def test_targets_whose_logits_are_not_head_of_state_are_refused(kind, sizes):
    config = getattr(transformers, kind + "Config")(
        vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=3.0, **sizes)
    with pytest.raises(ValueError, match=kind + "ForCausalLM"):
        make_draft(getattr(transformers, kind + "ForCausalLM")(config))

# -------------------------------------------------------------------- acceptance rule (sec. 2.1)

def reference_probabilities(logits, temperature, top_k, top_p):
    """Hugging Face's own warpers, in its order."""
    warpers = [transformers.TemperatureLogitsWarper(float(temperature))]
    warpers += [transformers.TopKLogitsWarper(top_k)] if top_k else []
    warpers += [transformers.TopPLogitsWarper(top_p)] if top_p < 1 else []
    for warp in warpers:
        logits = warp(None, logits)
    return logits.softmax(-1)

@pytest.mark.parametrize("temperature, top_k, top_p", [*itertools.product(
    (0.6, 1.0, 1.5), (0, 1, 5, 99), (0.1, 0.8, 1.0))])
def test_filters_equal_those_of_hugging_face(temperature, top_k, top_p):
    """Pitfall 25: one distribution, in float32, filters in the order temperature, top-k, top-p."""
    logits = 2 * torch.randn(50, 30, generator=torch.Generator().manual_seed(0))
    p = probabilities(logits, temperature, top_k, top_p)
    expected = reference_probabilities(logits, temperature, top_k, top_p)
    assert p.dtype == torch.float32 and ((p > 0) == (expected > 0)).all()
    torch.testing.assert_close(p, expected, rtol=1e-5, atol=1e-7)
    assert probabilities(logits.bfloat16(), temperature, top_k, top_p).dtype == torch.float32

def test_draw_inverts_the_distribution_function():
    weights = torch.tensor([0.0, 2.0, 0.0, 1.0, 1.0, 0.0])  # not normalised
    u = torch.tensor([0.0, 0.4999, 0.5, 0.7499, 0.75, 0.999999], dtype=torch.float64)
    assert draw(weights.expand(6, -1), u).tolist() == [1, 1, 3, 3, 4, 4]

@pytest.mark.parametrize("case", json.loads((DATA / "verify_rejection/cases.json").read_text())
                         ["instances"], ids=lambda case: str(case["index"]))
def test_verify_equals_deepspec(case):
    """Group D, rejection sampling with given uniforms. Pitfall 25."""
    io, i = load_file(DATA / "verify_rejection/io.safetensors"), case["index"]
    l, t = case["proposal_length"], case["temperature"]
    p, logits = io["out.target_probs"][i, : l + 1], io["in.target_logits"][i, : l + 1]
    if t:
        torch.testing.assert_close(probabilities(logits, t), p, rtol=0, atol=1e-6)
    u = torch.cat([io["in.u"][i, :l], io["in.u_next"][i : i + 1]])
    n, token = verify(io["in.tokens"][i, 1 : l + 1], io["in.draft_probs"][i, :l], p, uniforms=u)
    if case["terminated_by_stop_token"]:  # cut by our callers, not here
        assert n >= case["accepted_draft_tokens"]
    else:
        assert (n, token) == (case["accepted_draft_tokens"], case["next_token"])

def random_tables(rows, g, vocab, seed=0):
    r = torch.Generator().manual_seed(seed)
    q, p = (torch.rand(rows, n, vocab, generator=r, dtype=torch.float64) ** 3 for n in (g, g + 1))
    tokens = torch.randint(0, vocab, (rows, g), generator=r)
    return tokens, q / q.sum(-1, keepdim=True), p / p.sum(-1, keepdim=True), r

def test_verify_is_the_batched_rule_for_one_request():
    """Also: what lies beyond a request's length changes nothing."""
    tokens, q, p, r = random_tables(60, 3, 5)
    lengths, u = torch.arange(60) % 4, torch.rand(60, 4, generator=r, dtype=torch.float64)
    accepted, token = accept(tokens, lengths, q, p, u)
    for i, l in enumerate(lengths.tolist()):
        one = verify(tokens[i, :l], q[i, :l], p[i, : l + 1],
                     uniforms=torch.cat([u[i, :l], u[i, 3:]]))
        assert one == (int(accepted[i]), int(token[i]))
    assert set(accepted.tolist()) == {0, 1, 2, 3}

def edge(is_below):
    """Where a condition on u in [0, 1) that holds up to some point stops holding, by bisection."""
    low, high = 0.0, 1.0
    if not is_below(low):
        return low
    while high - low > 1e-14:
        middle = (low + high) / 2
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return low if high < 1.0 else 1.0

def outcomes(tokens, q, p):
    """The exact law of verify for given drafts, read off verify alone: {(n, token): probability}"""
    l, law = len(tokens), collections.Counter()

    def at(*u):
        return verify(tokens, q, p, uniforms=torch.tensor(u, dtype=torch.float64))

    reach, passed = 1.0, []
    for n in range(l + 1):
        fill = [0.999999999999] * (l - n)
        ratio = edge(lambda u: at(*passed, u, *fill)[0] > n) if n < l else 0.0
        stop = [(1 + ratio) / 2] if n < l else []  # a uniform that rejects draft n
        edges = [edge(lambda u, v=v: at(*passed, *stop, *fill[1:], u)[1] < v)
                 for v in range(p.shape[1] + 1)]
        for v, (a, b) in enumerate(zip(edges, edges[1:])):
            if ratio < 1 and b > a:
                law[n, v] += reach * (1 - ratio) * (b - a)
        reach, passed = reach * ratio, [*passed, ratio / 2]
    return law

def output_law(p, q1, q2, length):
    """Law of the first three tokens when `length(x1)` drafts are verified and the rest is the
    target's: p, q2 are functions of the text so far."""
    law, vocab = collections.Counter(), len(q1)
    for x in itertools.product(range(vocab), repeat=2):
        l = length(x[0])
        q, rows = torch.stack([q1, q2(x[0])]), torch.stack([p(x[:n]) for n in range(3)])
        for (n, token), share in outcomes(torch.tensor(x[:l]), q[:l], rows[: l + 1]).items():
            text = (*x[:n], token)
            for rest in itertools.product(range(vocab), repeat=3 - len(text)):
                whole = (*text, *rest)
                tail = [float(p(whole[:k])[whole[k]]) for k in range(len(text), 3)]
                law[whole] += float(q[0, x[0]] * q[1, x[1]]) * share * math.prod(tail)
    return law

@pytest.mark.parametrize("length", [0, 1, 2])
def test_output_law_of_verify_is_the_targets(length):
    """Exact, float64, 1e-12: integrated over drafts, acceptance and the final draw. Pitfall 25."""
    r = torch.Generator().manual_seed(5)
    def table():
        weights = torch.rand(3, generator=r, dtype=torch.float64) ** 2
        return weights / weights.sum()
    p = functools.cache(lambda text: table())
    q1, q2 = table(), functools.cache(lambda x: table())
    law = output_law(p, q1, q2, lambda x: length)
    for text in itertools.product(range(3), repeat=3):
        exact = math.prod(float(p(text[:k])[text[k]]) for k in range(3))
        assert abs(law[text] - exact) < 1e-12
    assert abs(sum(law.values()) - 1) < 1e-12

def search_all_lengths(confidence, sps):
    """What Algorithm 1 must not be: the best of all budgets, which looks past x_k at c_{k+1}."""
    survival = confidence[0].cumprod(0).tolist()
    values = [(1 + sum(survival[:n])) * sps(1 + n) for n in range(len(survival) + 1)]
    return torch.tensor([values.index(max(values))])

@pytest.mark.parametrize("search, expected", [
    (schedule_prefixes, (0.7, 0.3)), (search_all_lengths, (0.85, 0.15))])
def test_appendix_a_both_ways(search, expected):
    """Pitfall 33: the early stop keeps the target's law, a full search turns 0.7 into 0.85."""
    p = torch.tensor([0.7, 0.3], dtype=torch.float64)
    q = torch.tensor([0.5, 0.5], dtype=torch.float64)
    def length(x1):
        confidence = torch.tensor([[0.8, (0.9, 0.0)[x1]]])
        return int(search(confidence, lambda batch: {1: 1.0, 2: 0.5, 3: 0.45}[batch])[0])
    law = output_law(lambda text: p, q, lambda x: q, length)
    first = [sum(share for text, share in law.items() if text[0] == v) for v in (0, 1)]
    assert first == pytest.approx(expected, abs=1e-12)

# ------------------------------------------------- backbone and heads against the public libraries

def load_case(name):
    io = load_file(DATA / name / "io.safetensors")
    target = transformers.AutoModelForCausalLM.from_pretrained(DATA / "tiny_verifier").eval()
    return io, target

SPECULATORS = sorted(name for name, case in CASES.items() if case["group"] == "A")

def speculators_case(name):
    io, target = load_case(name)
    draft = DSparkDraft.from_pretrained(DATA / name, target)
    row = [io["in." + key] for key in ("hidden_states", "input_ids")]
    rest = [io["in." + key] for key in ("document_ids", "position_ids")]
    anchors, valid = io["in.anchors"][None], io["in.anchor_valid"][None]
    with torch.no_grad():
        out = draft(*row, anchors, valid, *rest)
    return io, target, draft, out

@pytest.mark.parametrize("name", SPECULATORS)
def test_training_forward_equals_speculators(name):
    """Group A. Pitfalls 16 (layer ids), 20 (RoPE base), 35 (confidence row and embedding)."""
    io, _, draft, out = speculators_case(name)
    valid, size = io["in.anchor_valid"], draft.config.block_size
    names = ["hidden", "logits"] + ["confidence_logits"] * ("out.confidence_logits" in io)
    for key in names:
        expected = io["out." + key][0].unflatten(0, (-1, size))
        torch.testing.assert_close(getattr(out, key)[0][valid], expected[valid], **CLOSE)
    assert (out.confidence_logits is None) == ("out.confidence_logits" not in io)

@pytest.mark.parametrize("name", SPECULATORS)
def test_visibility_equals_speculators(name):
    """Pitfall 1: who sees whom, bit for bit; in the sliding layer too."""
    io, _, draft, _ = speculators_case(name)
    anchors, config = io["in.anchors"], draft.config
    where = [io[key] for key in ("in.position_ids", "in.document_ids")]
    rows = io["in.anchor_valid"].repeat_interleave(config.block_size)
    for key, window in (("full", 0), ("sliding", config.sliding_window)):
        if "out.attn_allowed_" + key in io:
            mask = visibility(*(x[:, anchors] for x in where), *where, config, window)[0]
            assert torch.equal(mask[rows], io["out.attn_allowed_" + key][rows])

def weighted_mean(values, weight, count):
    return float((values * weight).sum() / count)

@pytest.mark.parametrize("name", SPECULATORS)
def test_loss_terms_equal_speculators_by_its_formula(name):
    """Its formula: argmax labels, the mask at the slot's own position, slots counted unweighted."""
    import train

    io, target, draft, out = speculators_case(name)
    size, first = draft.config.block_size, draft.config.block_size - draft.config.gamma
    last = io["in.verifier_last_hidden_states"][0]
    last = last * (last.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * io["w.verifier_norm.weight"]
    head = io.get("w.verifier_lm_head_full.weight", io["w.verifier_lm_head.weight"])
    index = io["in.anchors"][:, None] + torch.arange(size) - first
    teacher = (last @ head.T)[index % len(last)]  # [N, K, V]
    stored = load_file(DATA / name / "model.safetensors")
    ids = stored["t2d"].nonzero()[:, 0] if "t2d" in stored else torch.arange(128)
    labels = ids[teacher[..., ids].argmax(-1)]
    terms = train.slot_terms(out.logits[0], teacher, labels, ids)
    real, mask = io["in.anchor_valid"], io["out.aligned_loss_mask"][0].unflatten(0, (-1, size))
    for key in ("ce", "tv"):
        expected = io[f"out.{key}_elementwise"][0].unflatten(0, (-1, size))
        torch.testing.assert_close(terms[key][real], expected[real], **CLOSE)
    slot = torch.arange(size) - first
    weight, count = mask * torch.exp(-slot / 4.0) * (slot >= 0), mask.sum() + 1e-5
    loss = sum(share * weighted_mean(terms[key], weight, count)
               for key, share in (("ce", 0.1), ("tv", 0.9)))
    if out.confidence_logits is not None:
        rate = io["out.accept_rate"][0].unflatten(0, (-1, size))
        bce = F.binary_cross_entropy_with_logits(out.confidence_logits[0], rate, reduction="none")
        loss += weighted_mean(bce, weight, count)
    assert loss == pytest.approx(CASES[name]["loss"], abs=1e-5)

def draft_by_hand(name, target):
    """A DeepSpec or z-lab checkpoint: the same tensor names as ours, another config.json."""
    raw = json.loads((DATA / name / "config.json").read_text())
    fields = dict(num_hidden_layers=2, target_layer_ids=[0, 1, 2], mask_token_id=127,
                  block_size=raw["block_size"])
    if CASES[name]["group"] == "B":
        fields.update(markov_rank=8, markov_head_type=raw["markov_head_type"])
    else:
        fields.update(markov_rank=0, enable_confidence_head=False, sample_from_anchor=False)
    tensors = load_file(DATA / name / "model.safetensors")
    for key, own in (("embed_tokens", target.get_input_embeddings()),
                     ("lm_head", target.get_output_embeddings())):
        assert torch.equal(tensors.pop(key + ".weight", own.weight), own.weight)
    draft = DSparkDraft.from_target(target, **fields)
    draft.load_state_dict(tensors)
    return draft

DEEPSPEC = sorted(name for name, case in CASES.items() if case["group"] == "B")

@pytest.mark.parametrize("name", DEEPSPEC)
def test_training_forward_and_loss_equal_deepspec(name):
    """Group B: batch of two, a dummy anchor, gradients. Its L1 weighs 0.9, that is TV twice."""
    import train

    io, target = load_case(name)
    draft = draft_by_hand(name, target)
    at = {key[9:]: value for key, value in io.items() if key.startswith("train.in.")}
    anchors, valid = at["anchor_positions"], at["block_keep_mask"]
    out = draft(at["target_hidden_states"], at["input_ids"], anchors, valid)
    for mine, theirs in ((out.logits, "draft_logits"), (out.confidence_logits, "confidence_pred")):
        torch.testing.assert_close(mine[valid], io["train.out." + theirs][valid], **CLOSE)
    index, supervised = train.slot_labels(
        draft.config, at["input_ids"], at["loss_mask"], anchors, valid)
    assert torch.equal(supervised, io["train.out.eval_mask"])
    labels = at["input_ids"].gather(1, index.flatten(1)).view(index.shape)
    assert torch.equal(labels[supervised], io["train.out.target_ids"][supervised])
    loss, _ = train.dspark_loss(
        draft, at["target_hidden_states"], at["target_last_hidden_states"], at["input_ids"],
        at["loss_mask"], anchors, valid, loss_fn={"ce": 0.1, "tv": 1.8})
    assert float(loss) == pytest.approx(CASES[name]["loss"], abs=1e-5)
    loss.backward()
    norms = {key: float(p.grad.norm()) for key, p in draft.named_parameters()}
    assert norms == pytest.approx(CASES[name]["grad_norms"], rel=1e-3, abs=1e-6)

def rounds_of(name):
    """Two cached drafting rounds in the same words for DeepSpec and z-lab."""
    io, target = load_case(name)
    prefix = "infer." if CASES[name]["group"] == "B" else ""
    features = io.get("infer.in.sequence_target_hidden_states", io.get("in.sequence_target_hidden"))
    ids = io[prefix + "in.sequence_ids"]
    steps = [{key[len(prefix) + 3 :]: value for key, value in io.items()
              if key.startswith(f"{prefix}r{r}.")} for r in (1, 2)]
    return target, features, ids, zip((11, 14), steps)

@torch.no_grad()
@pytest.mark.parametrize("name", [*DEEPSPEC, "zlab_dflash"])
def test_cached_drafting_equals_deepspec_and_zlab(name):
    """Groups B and C: hidden states, tokens, confidence, and the draft's own cache."""
    target, features, ids, steps = rounds_of(name)
    draft, context, done = draft_by_hand(name, target), None, 0
    for start, step in steps:
        position = torch.arange(done, start)[None]
        new = draft.context_keys_values(features[:, done:start], position)
        context = new if context is None else [
            [torch.cat(x, 2) for x in zip(old, fresh)] for old, fresh in zip(context, new)]
        anchor, at, done = ids[:, start], torch.tensor([start]), start
        for layer, pair in enumerate(context):
            for kind, mine in zip("kv", pair):
                torch.testing.assert_close(mine, step[f"out.cache_{kind}.{layer}"], **CLOSE)
        zero = torch.zeros(1, 1, dtype=torch.long)
        hidden = draft.run_blocks(
            anchor[None], at[None], zero, context, torch.arange(start)[None], zero)
        expected = step.get("out.block_hidden", step.get("out.hidden"))
        torch.testing.assert_close(hidden[:, 0], expected, **CLOSE)
        gamma = draft.config.gamma
        out = draft.propose(anchor, at, context, gamma, torch.zeros(1, gamma))
        assert torch.equal(out.tokens, step.get("out.sampled_tokens", step.get("out.draft_tokens")))
        if "out.confidence_logits" in step:
            torch.testing.assert_close(out.confidence, step["out.confidence_logits"], **CLOSE)

@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_one_step_serves_candidates_and_whole_vocabulary(kind):
    """The bias of some candidates is the bias of all, at those; each head adds one idea."""
    head = make_draft(make_target(), markov_head_type=kind).markov_head
    assert isinstance(head, VanillaHead) and type(head) is MARKOV_HEADS[kind]
    r = torch.Generator().manual_seed(2)
    prev, hidden = torch.randint(0, V, (5,), generator=r), torch.randn(5, 32, generator=r)
    rows, state = torch.randint(0, V, (5, 7), generator=r), None
    for _ in range(3):
        bias, after = head.step(prev, hidden, state)
        some, _ = head.step(prev, hidden, state, head.markov_w2.weight[rows])
        torch.testing.assert_close(some, bias.gather(1, rows), **CLOSE)
        state = after
    assert (state is None) == (kind != "rnn")

# ------------------------------------------------------------- training forward equals drafting

@contextlib.contextmanager
def spied(draft):
    """The draft's proposals, one after another, while generate runs."""
    seen, real = [], draft.propose
    def propose(*args, **kwargs):
        seen.append(real(*args, **kwargs))
        return seen[-1]
    draft.propose = propose
    try:
        yield seen
    finally:
        del draft.propose

def real_rounds(target, draft, **options):
    """[text up to the anchor, its drafts, q, confidence logits] of each block drafted by generate."""
    blocks, known = [], collections.defaultdict(lambda: 1)
    def on_round(now):
        for i, one in enumerate(now.requests):
            text = [*one.prompt, *one.tokens[: known[id(one)]]]
            known[id(one)] = len(one.tokens)
            confidence = seen[-1].confidence[i]
            torch.testing.assert_close(torch.tensor(now.confidence[i]), confidence.sigmoid())
            blocks.append((text, now.drafts[i], seen[-1].q, i, confidence))
    with spied(draft) as seen:
        generate(target, draft, make_prompts(3), 9, schedule=ragged, on_round=on_round, **options)
    return [(text, drafts, None if q is None else q[i], confidence)
            for text, drafts, q, i, confidence in blocks]

@torch.no_grad()
def teacher_forced(target, draft, blocks):
    """The same blocks through the training forward: two rows of packed documents, padded; in each
    document a second block, one position earlier."""
    rows = []
    for part in (blocks[0::2], blocks[1::2]):
        columns, anchors, at = [], [], 0
        for number, (text, drafts, *_) in enumerate(part):
            ids = torch.tensor(text + drafts)
            features, count = states_of(target, ids)[0][0], len(ids)
            columns.append((features, ids, torch.full((count,), number), torch.arange(count)))
            anchors += [at + max(len(text) - 2, 0), at + len(text) - 1]
            at += count
        rows.append([torch.cat(x) for x in zip(*columns)] + [torch.tensor(anchors)])
    pad = torch.nn.utils.rnn.pad_sequence
    features, ids, positions, anchors = (
        pad([row[i] for row in rows], batch_first=True) for i in (0, 1, 3, 4))
    documents = pad([row[2] for row in rows], batch_first=True, padding_value=-1)
    return draft(features, ids, anchors, document_ids=documents, position_ids=positions)

def check_training_equals_drafting(target, draft, ids):
    """Slot by slot: log-probabilities and confidence logits, 2e-5."""
    generator = torch.Generator().manual_seed(7)
    blocks = real_rounds(target, draft, temperature=1.0, generator=generator)
    out, gamma = teacher_forced(target, draft, blocks), draft.config.gamma
    first = draft.config.block_size - gamma
    for i, (_, _, q, confidence) in enumerate(blocks):
        row, column = i % 2, 2 * (i // 2) + 1
        expected = out.logits[row, column, first:].log_softmax(-1)
        torch.testing.assert_close(q[:, ids].log(), expected, **CLOSE)
        torch.testing.assert_close(confidence, out.confidence_logits[row, column, first:], **CLOSE)
        assert q.sum(-1).allclose(q[:, ids].sum(-1))  # nothing outside the draft vocabulary
    assert len(blocks) > 15

@pytest.mark.parametrize("from_anchor", [True, False])
@pytest.mark.parametrize("head", HEADS)
def test_training_forward_equals_incremental_drafting(head, from_anchor):
    """Pitfalls 1, 2, 17, 27: packed rows against generate's own cache, reduced vocabulary."""
    target = make_target()
    draft = make_draft(target, draft_ids=DRAFT_IDS, sample_from_anchor=from_anchor,
                       block_size=GAMMA + 1 - from_anchor, **HEADS[head])
    check_training_equals_drafting(target, draft, DRAFT_IDS)

def test_training_forward_equals_drafting_for_a_sliding_target_and_draft():
    """Published drafts have sliding layers: the window counts back from the anchor."""
    target = make_target("mistral")
    draft = make_draft(target, layer_types=["sliding_attention", "full_attention"],
                       sliding_window=3, sliding_window_non_causal=False)
    check_training_equals_drafting(target, draft, list(range(V)))

def test_a_leak_of_the_anchors_target_state_is_noticed(monkeypatch):
    """The test above can fail: `<` becomes `<=` in visibility."""
    real = visibility
    monkeypatch.setattr(dspark, "visibility", lambda position, *rest: real(position + 1, *rest))
    with pytest.raises(AssertionError, match="not close"):
        check_training_equals_drafting(make_target(), make_draft(make_target()), list(range(V)))

@pytest.mark.parametrize("kind", ["vanilla", "none"])
def test_reduced_vocabulary_equals_a_dense_reference(kind):
    """Pitfall 17: greedy chain over a [V, V] table with -inf where there is no draft id."""
    target = make_target()
    draft = make_draft(target, draft_ids=DRAFT_IDS, **HEADS[kind])
    weights, blocks = draft.state_dict(), real_rounds(target, draft)
    bias = torch.zeros(V, V)  # [previous, next]
    if kind == "vanilla":
        w1, w2 = (weights[f"markov_head.markov_w{i}.weight"] for i in (1, 2))
        bias[:, DRAFT_IDS] = w1 @ w2.T
    outside = torch.ones(V, dtype=torch.bool).index_fill(0, torch.tensor(DRAFT_IDS), False)
    bias[:, outside] = -math.inf
    hidden, head = teacher_forced(target, draft, blocks).hidden, target.get_output_embeddings().weight
    for i, (text, drafts, _, _) in enumerate(blocks):
        chain = text[-1:]
        for h in hidden[i % 2, 2 * (i // 2) + 1]:
            chain.append(int((head @ h + bias[chain[-1]]).argmax()))
        assert chain[1:] == drafts
    assert {x for _, drafts, *_ in blocks for x in drafts} <= set(DRAFT_IDS)

# ------------------------------------------------------------------------------- save and load

@pytest.mark.parametrize("overrides", [
    {}, dict(draft_ids=DRAFT_IDS, sample_from_anchor=False), dict(markov_head_type="rnn"),
    dict(markov_rank=0, enable_confidence_head=False, sample_from_anchor=False),
    dict(layer_types=["sliding_attention", "full_attention"], sliding_window=3)])
def test_save_and_load_give_the_same_draft(tmp_path, overrides):
    """Pitfalls 15, 17, 20: nothing is left to a loader's default."""
    target = make_target()
    draft = make_draft(target, **overrides)
    draft.save_pretrained(tmp_path)
    again = DSparkDraft.from_pretrained(tmp_path, target)
    assert again.config == draft.config
    features, ids = torch.randn(1, 12, 64), torch.arange(12)[None]
    for a, b in zip(*(x(features, ids, torch.tensor([[2, 5]])) for x in (draft, again))):
        assert (a is None and b is None) or torch.equal(a, b)
    assert texts(generate(target, draft, [[1, 2]], 9)) == texts(generate(target, again, [[1, 2]], 9))

def test_config_json_writes_every_field(tmp_path):
    """Pitfalls 15, 16, 20: loaders disagree about defaults; speculators counts layers from 1."""
    make_draft(make_target()).save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert set(raw) >= set(
        "architectures speculators_model_type speculators_version speculators_config mask_token_id "
        "transformer_layer_config aux_hidden_state_layer_ids block_size draft_vocab_size markov_rank "
        "markov_head_type sample_from_anchor enable_confidence_head confidence_head_with_markov "
        .split()) and "model_type" not in raw
    assert set(raw["transformer_layer_config"]) >= set(
        "model_type hidden_size intermediate_size num_hidden_layers num_attention_heads head_dim "
        "num_key_value_heads hidden_act rms_norm_eps max_position_embeddings attention_bias "
        "vocab_size layer_types rope_parameters".split())
    assert raw["aux_hidden_state_layer_ids"] == [1, 3]
    assert raw["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == GAMMA
    assert raw["speculators_config"]["verifier"]["architectures"] == ["Qwen3ForCausalLM"]

def test_the_checkpoint_holds_the_draft_alone(tmp_path):
    """Pitfall 9: no embedding, no head of the target; with a reduced vocabulary its own head, and
    d2t as offsets."""
    draft, folder = make_draft(make_target()), tmp_path / "full"
    draft.save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    assert set(stored) == {name for name, _ in draft.named_parameters()}
    make_draft(make_target(), draft_ids=DRAFT_IDS).save_pretrained(tmp_path)
    more = load_file(tmp_path / "model.safetensors")
    assert set(more) - set(stored) == {"lm_head.weight", "d2t", "t2d"}
    assert (torch.arange(len(DRAFT_IDS)) + more["d2t"]).tolist() == DRAFT_IDS
    assert more["t2d"].nonzero()[:, 0].tolist() == DRAFT_IDS

def test_missing_and_unexpected_tensors_raise_by_name(tmp_path):
    """Pitfall 18."""
    make_draft(make_target()).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["fc.wait"] = tensors.pop("fc.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"(?s)fc\.weight.*fc\.wait"):
        DSparkDraft.from_pretrained(tmp_path, make_target())
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="model.safetensors"):
        DSparkDraft.from_pretrained(tmp_path, make_target())

def test_a_draft_of_another_target_is_refused_naming_both(tmp_path):
    """Pitfall 19."""
    mine, other = make_target(seed=8), make_target(vocab=50)
    mine.config._name_or_path, other.config._name_or_path = "org/mine", "org/other"
    make_draft(mine).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"(?s)org/mine.*61.*org/other.*50"):
        DSparkDraft.from_pretrained(tmp_path, other)
    with pytest.raises(ValueError, match="another target"):
        generate(other, make_draft(mine), [[1]], 3)

# -------------------------------------------------------------------------- scheduling (sec. 3.2.2)

@pytest.mark.parametrize("case", json.loads((DATA / "scheduler/cases.json").read_text())["instances"],
                         ids=lambda case: case["name"])
def test_algorithm_1_stops_at_the_first_non_improvement(case):
    """Group E, ties and plateaus included. Pitfall 33."""
    confidence = torch.tensor(case["confidence"], dtype=torch.float64)
    lengths = schedule_prefixes(confidence, lambda batch: case["sps"][batch])
    assert lengths.dtype == torch.long and lengths.tolist() == case["early_stop"]["lengths"]

def test_a_flat_cost_verifies_all_and_a_steep_one_nothing():
    confidence = torch.full((3, 4), 0.5)
    assert schedule_prefixes(confidence, lambda batch: 1.0).tolist() == [4, 4, 4]
    assert schedule_prefixes(confidence, lambda batch: 1 / batch**2).tolist() == [0, 0, 0]
    confidence[1, 2] = 0.0  # zero survival never enters, however cheap
    assert schedule_prefixes(confidence, lambda batch: 1.0).tolist() == [4, 2, 4]

# -------------------------------------------------------------------------- generate: greedy text

SCHEDULES = ["full", 0, 1, GAMMA - 1, GAMMA, 0.0, 0.45, 0.7, 1.0, "prefix", ragged]

@functools.cache
def plain_greedy(family, count=16, budget=14):
    return texts(generate(make_target(family), None, make_prompts(count), budget))

@pytest.mark.parametrize("family", FAMILIES)
def test_plain_decoding_equals_hugging_face(family):
    """Packed rows, ragged cache, sliding windows (pitfall 29): the same greedy text."""
    target, mine = make_target(family), plain_greedy(family)
    for prompt, text in list(zip(make_prompts(16), mine))[:6]:
        ids = torch.tensor([prompt])
        out = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=14,
                              do_sample=False)
        assert out[0, len(prompt) :].tolist() == text
    assert len(set(map(tuple, mine))) == 16

@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_any_draft_gives_exactly_the_greedy_text(family, schedule):
    """Pitfalls 27, 28: R = 16 in one batch and in five places, with a draft that is right half the
    time; R = 3 and R = 1 alone give the same text as in the batch."""
    target, prompts, plain = make_target(family), make_prompts(16), plain_greedy(family)
    draft = guess_half(target)
    options = dict(schedule=schedule, steps_per_second=cost)
    for places in (None, 5):
        out = generate(target, draft, prompts, 14, max_concurrency=places, **options)
        assert texts(out) == plain
    assert texts(generate(target, draft, prompts[4:7], 14, **options)) == plain[4:7]
    assert texts(generate(target, draft, prompts[9:10], 14, **options)) == plain[9:10]
    if schedule == "full":
        assert 1.4 < total(out).accepted_length < 3.5  # neither useless nor always right

@pytest.mark.parametrize("head", HEADS)
def test_an_untrained_draft_gives_exactly_the_greedy_text(head):
    """Pitfall 27, with every head, both layouts, a reduced vocabulary, and few candidates."""
    target, prompts, plain = make_target(), make_prompts(16), plain_greedy("qwen3")
    for from_anchor, ids, top in itertools.product((True, False), (None, DRAFT_IDS), (0, 3)):
        draft = make_draft(target, draft_ids=ids, sample_from_anchor=from_anchor, **HEADS[head])
        assert texts(generate(target, draft, prompts, 14, schedule=ragged, markov_top_k=top)) == plain

def test_nothing_leaks_from_one_call_into_the_next():
    """Pitfall 28: the second call equals a fresh one, in text and counters."""
    target, prompts = make_target(), make_prompts(5)
    draft = guess_half(target)
    fresh = generate(target, draft, prompts[:2], 14)
    generate(target, draft, prompts[2:], 9, temperature=1.0)
    second = generate(target, draft, prompts[:2], 14)
    assert [(x.tokens, x.accepts) for x in fresh] == [(x.tokens, x.accepts) for x in second]

def test_a_seed_repeats_a_sampled_run():
    target, prompts = make_target(), make_prompts(4)
    draft = guess_half(target)
    def run(seed):
        generator = torch.Generator().manual_seed(seed)
        return texts(generate(target, draft, prompts, 14, temperature=1.0, schedule="prefix",
                              steps_per_second=cost, generator=generator))
    assert run(1) == run(1) != run(2)

# ------------------------------------------------------------------- generate: stops and budgets

def truncated(text, budget, stops):
    """What plain decoding returns: up to the budget or the first stop, which is included."""
    kept = text[:budget]
    return kept[: min((i + 1 for i, x in enumerate(kept) if x in stops), default=budget)]

@contextlib.contextmanager
def oracle(draft, prompt, text, right):
    """The draft proposes the true continuation, but for the token after `right` correct ones."""
    real = draft.propose
    def propose(anchors, position, *rest, **options):
        out = real(anchors, position, *rest, **options)
        at = int(position[0]) - len(prompt) + 1
        true = torch.tensor([text[at : at + out.tokens.shape[1]]])
        true[:, right : right + 1] = (true[:, right : right + 1] + 1) % V
        return out._replace(tokens=true)
    draft.propose = propose
    try:
        yield draft
    finally:
        del draft.propose

@functools.cache
def long_text(budget=2 * GAMMA + 3):
    """A prompt, and more of its greedy text than any budget here needs."""
    prompt = [5, 9, 2]
    return prompt, texts(generate(make_target(), None, [prompt], budget + GAMMA + 1))[0]

@pytest.mark.parametrize("right", [GAMMA, 0, 2])
def test_budgets_are_met_exactly(right):
    """Pitfall 23: 0, 1, 2, ... tokens, full acceptance with one slot left."""
    (prompt, text), draft = long_text(), make_draft(make_target())
    for budget in range(2 * GAMMA + 4):
        with oracle(draft, prompt, text, right):
            one = generate(make_target(), draft, [prompt], budget)[0]
        assert one.tokens == text[:budget]
        assert one.rounds == -(-max(budget - 1, 0) // (right + 1))
        assert set(one.accepts) <= {right}  # counted before the cut
        assert texts(generate(make_target(), None, [prompt], budget)) == [text[:budget]]

@pytest.mark.parametrize("right", [GAMMA, 2])
def test_a_stop_inside_a_block_ends_the_text_there(right):
    """Pitfall 23: every token of the text as stop, alone, as an int, and in a list of several."""
    (prompt, text), draft, budget = long_text(), make_draft(make_target()), 2 * GAMMA + 3
    assert len(set(text[:budget])) > GAMMA + 1
    for stop in text[:budget]:
        for stops in (stop, [stop], [stop, text[4], 60]):
            expected = truncated(text, budget, [stop] if stops is stop else stops)
            with oracle(draft, prompt, text, right):
                out = generate(make_target(), draft, [prompt], budget, stop_token_ids=stops)
            plain = generate(make_target(), None, [prompt], budget, stop_token_ids=stops)
            assert texts(out) == texts(plain) == [expected]

def test_requests_that_end_at_different_times_do_not_disturb_each_other():
    """Pitfalls 23, 28: places are taken over while others go on."""
    target, prompts, plain = make_target(), make_prompts(16), plain_greedy("qwen3")
    stops = [plain[0][3], plain[5][7], plain[9][1]]
    expected = [truncated(text, 14, stops) for text in plain]
    assert len(set(map(len, expected))) > 3
    for places, schedule in itertools.product((None, 1, 3), ("full", ragged)):
        out = generate(target, guess_half(target), prompts, 14, stop_token_ids=stops,
                       schedule=schedule, max_concurrency=places)
        assert texts(out) == expected

# ------------------------------------------------------------------ generate: law of sampled text

def chi_square(counts, expected):
    """p-value; cells expected fewer than five times are pooled, impossible ones must stay empty."""
    if (counts[expected == 0] > 0).any():
        return 0.0
    rare = expected < 5
    counts, expected = (torch.cat([x[~rare], x[rare].sum()[None]]) for x in (counts, expected))
    counts, expected = counts[expected > 0], expected[expected > 0]
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(counts) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))

TOY, PROMPT = 6, [3, 1]

@functools.cache
def toy_models():
    target = make_target(vocab=TOY, seed=4)
    return target, make_draft(target, seed=5, markov_rank=4, block_size=3)

@torch.no_grad()
def exact_law(target, filters):
    """[TOY^3] probabilities of the first three tokens, by Hugging Face's forward and warpers."""
    law = torch.ones(1)
    for n in range(3):
        tails = torch.tensor([*itertools.product(range(TOY), repeat=n)], dtype=torch.long)
        ids = torch.cat([torch.tensor(PROMPT).expand(TOY**n, -1), tails.view(TOY**n, n)], 1)
        p = reference_probabilities(target(ids).logits[:, -1], *filters)
        law = (law[:, None] * p).flatten()
    return law.double()

def sample_p_value(filters, samples, seed, **options):
    """Decode many copies of one prompt; compare the counts of three-token texts with the law."""
    target, draft = toy_models()
    generator, counts = torch.Generator().manual_seed(seed), torch.zeros(TOY**3).double()
    place, done, verified = torch.tensor([TOY**2, TOY, 1]), 0, 0
    while done < samples:
        out = generate(target, draft, [PROMPT] * min(2000, samples - done), 3, *filters,
                       generator=generator, **options)
        index = torch.tensor(texts(out)) @ place
        counts += torch.bincount(index, minlength=TOY**3)
        done, verified = done + len(out), verified + total(out).verified / total(out).rounds
    return chi_square(counts, exact_law(target, filters) * samples), verified / -(-samples // 2000)

GRID = [((1.0, 0, 1.0), {}), ((1.0, 0, 1.0), dict(schedule=0.5)), ((0.7, 3, 1.0), {}),
        ((1.4, 0, 0.8), dict(schedule=0.5)), ((0.8, 4, 0.9), dict(schedule=1)),
        ((1.0, 0, 1.0), dict(markov_top_k=2)), ((1.0, 0, 1.0), dict(draft_sampling="argmax")),
        ((1.0, 0, 0.9), dict(schedule=ragged))]

@pytest.mark.parametrize("filters, options", GRID, ids=str)
def test_sampled_text_follows_the_targets_law(filters, options):
    """Pitfall 25: 8 settings x 25,000 texts. Bonferroni: each fails below 0.001 / 8, so with fresh
    seeds a correct program would be accused once in a thousand runs; the seeds are fixed."""
    p_value, verified = sample_p_value(filters, 25000, seed=len(str(options)), **options)
    assert p_value > 0.001 / len(GRID)
    assert verified == 3 or "schedule" in options and 0 < verified < 3

def test_plain_sampling_follows_the_targets_law():
    target, _ = toy_models()
    out = generate(target, None, [PROMPT] * 2000, 3, 0.9, 4, generator=torch.Generator().manual_seed(0))
    index = torch.tensor(texts(out)) @ torch.tensor([TOY**2, TOY, 1])
    counts = torch.bincount(index, minlength=TOY**3).double()
    assert chi_square(counts, exact_law(target, (0.9, 4, 1.0)) * 2000) > 0.001

def test_a_missing_residual_is_noticed(monkeypatch):
    """The test above can fail: after a rejection, a draw from p itself."""
    def lossy(tokens, lengths, q, p, uniforms):
        accepted = accept(tokens, lengths, q, p, uniforms)[0]
        return accepted, draw(p[torch.arange(len(p)), accepted], uniforms[:, -1])
    monkeypatch.setattr(dspark, "accept", lossy)
    assert sample_p_value((1.0, 0, 1.0), 4000, seed=1)[0] < 1e-9

# --------------------------------------------------------- generate: work, counters, housekeeping

@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_the_target_is_sent_r_plus_sum_of_lengths(schedule):
    """Pitfall 31: cut before the forward, in every round; the prompts once."""
    target, prompts, sent, rounds = make_target(), make_prompts(7), [], []
    def on_round(now):
        rounds.append(len(now.requests) + sum(now.lengths))
        assert sent[-1] == rounds[-1]
    def count(module, args, kwargs):
        sent.append((kwargs["input_ids"] if "input_ids" in kwargs else args[0]).numel())
    draft, hook = guess_half(target), target.register_forward_pre_hook(count, with_kwargs=True)
    try:
        out = generate(target, draft, prompts, 14, schedule=schedule, steps_per_second=cost,
                       max_concurrency=4, on_round=on_round)
    finally:
        hook.remove()
    assert sum(sent) == sum(map(len, prompts)) + sum(rounds)
    assert sum(rounds) == sum(one.rounds + one.verified for one in out)

def test_counters_tell_what_happened():
    """Counted before the cut at a stop or the budget; positions as vLLM counts them."""
    target, log = make_target(), []
    out = generate(target, guess_half(target), make_prompts(6), 14, schedule=ragged,
                   on_round=lambda now: log.extend(zip(now.lengths, now.accepted)))
    whole, rounds = total(out), len(log)
    accepted = sum(a for _, a in log)
    assert (whole.rounds, whole.accepted) == (rounds, accepted)
    assert (whole.verified, whole.drafted) == (sum(l for l, _ in log), GAMMA * rounds)
    assert whole.accepted_length == pytest.approx(1 + accepted / rounds)
    for k in range(GAMMA):
        hits = sum(a > k for _, a in log)
        tried = sum(l > k and a >= k for l, a in log)
        assert whole.acceptance_by_position[k] == pytest.approx(hits / rounds)
        assert whole.conditional_acceptance[k] == pytest.approx(hits / tried)
    assert math.isnan(generate(target, None, [[1]], 1)[0].accepted_length)  # no round at all

def test_plain_decoding_is_a_schedule_of_zero_and_drafts_nothing():
    target = make_target()
    with spied(guess_half(target)) as seen:
        zero = generate(target, guess_half(target), make_prompts(3), 9, schedule=0)
    assert not seen and [one.drafted for one in zero] == [0, 0, 0]
    assert [one.rounds for one in zero] == [8, 8, 8]

class Interrupted(Exception):
    pass

def interrupt(*_):
    raise Interrupted

@pytest.mark.parametrize("training", [True, False])
def test_the_target_is_left_as_found_also_after_an_exception(training):
    target = make_target(seed=11).train(training)
    target.set_attn_implementation("eager")
    draft = make_draft(target)
    for options in ({}, dict(on_round=interrupt), dict(schedule=interrupt)):
        with pytest.raises(Interrupted) if options else contextlib.nullcontext():
            generate(target, draft, [[1, 2]], 5, **options)
        assert target.config._attn_implementation == "eager" and target.training == training

def test_stopwatch_tells_prefill_from_rounds():
    target = make_target()
    with Stopwatch(target) as seconds:
        generate(target, None, make_prompts(3), 6)
    assert seconds["prefill"] > 0 and seconds["target"] > 0
    assert seconds["all"] >= seconds["prefill"] + seconds["target"]
    before = dict(seconds)
    generate(target, None, [[1]], 2)
    assert seconds == before  # its hooks are gone

@pytest.mark.parametrize("options, words", [
    (dict(prompts=[[]]), "prompt 0"), (dict(prompts=[[1], [V]]), "prompt 1"),
    (dict(prompts=[[-1]]), "prompt 0"), (dict(schedule=True), "schedule"),
    (dict(schedule=False), "schedule"), (dict(schedule=GAMMA + 1), "schedule"),
    (dict(schedule=-1), "schedule"), (dict(schedule=1.5), "schedule"),
    (dict(schedule="half"), "schedule"), (dict(schedule="prefix"), "steps_per_second"),
    (dict(temperature=-0.1), "temperature"), (dict(temperature=math.nan), "temperature"),
    (dict(top_p=0.0), "top_p"), (dict(top_p=1.1), "top_p"), (dict(top_k=-1), "top_k"),
    (dict(draft_sampling="beam"), "beam"), (dict(max_new_tokens=-1), "max_new_tokens"),
    (dict(max_new_tokens=124), "max_position_embeddings"), (dict(max_concurrency=-1), "concurrency")])
def test_bad_input_is_refused_by_name(options, words):
    target = make_target()
    call = {**dict(prompts=[[1]], max_new_tokens=3), **options}
    with pytest.raises(ValueError, match=words):
        generate(target, make_draft(target), **call)

def test_a_draft_without_confidence_takes_no_confidence_schedule():
    draft = make_draft(make_target(), enable_confidence_head=False)
    for schedule in (0.5, "prefix", ragged):
        with pytest.raises(ValueError, match="confidence"):
            generate(make_target(), draft, [[1]], 3, schedule=schedule, steps_per_second=cost)

@pytest.mark.parametrize("kind, sizes", [
    ("Mamba", dict(state_size=4)), ("Rwkv", dict(attention_hidden_size=32)),
    ("Bamba", dict(num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
                   mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8))])
def test_recurrent_and_hybrid_targets_are_refused_by_name(kind, sizes):
    """Pitfall 29: their state cannot be rolled back."""
    config = getattr(transformers, kind + "Config")(
        vocab_size=V, hidden_size=32, num_hidden_layers=2, **sizes)
    target = getattr(transformers, kind + "ForCausalLM")(config)
    with pytest.raises(ValueError, match=kind):
        generate(target, None, [[1, 2]], 3)

# ---------------------------------------------------------------------- the objective (train.py)

def one_row(size, spans):
    """loss_mask [1, S] with assistant tokens in the given spans, ends included."""
    mask = torch.zeros(1, size, dtype=torch.long)
    for first, last in spans:
        mask[0, first : last + 1] = 1
    return mask

@pytest.mark.parametrize("size, from_anchor, slots", [
    (40, True, [1, 1, 0, 0]), (50, True, [1, 1, 0, 0]), (40, False, [0, 1, 1, 0])])
def test_a_slot_is_supervised_by_the_token_it_predicts(size, from_anchor, slots):
    """Pitfall 3: span 8..39, block 4, anchor 37, inside the row and at its end."""
    import train

    config = make_draft(make_target(), sample_from_anchor=from_anchor).config
    ids = torch.arange(size)[None]
    index, supervised = train.slot_labels(
        config, ids, one_row(size, [(8, 39)]), torch.tensor([[37]]), torch.tensor([[True]]))
    assert supervised[0, 0].long().tolist() == slots
    first = 37 + from_anchor
    assert index[0, 0].tolist() == [min(first + k, size - 1) for k in range(4)]

def test_labels_never_come_from_the_next_document_or_after_a_gap():
    """Pitfall 4; and a contiguous prefix: user tokens in between end the block."""
    import train

    config = make_draft(make_target()).config
    documents = torch.tensor([[0] * 10 + [1] * 10 + [-1] * 4])
    mask = one_row(24, [(4, 9), (10, 13), (15, 23)])
    anchors = torch.tensor([[7, 11, 18, 18]])
    valid = torch.tensor([[True, True, True, False]])
    _, supervised = train.slot_labels(config, documents, mask, anchors, valid, documents)
    assert supervised[0].long().tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [1, 0, 0, 0], [0] * 4]

def test_anchors_are_those_that_decoding_meets():
    """Pitfall 8: an anchor and its first predicted token are supervised, in one document."""
    import train

    documents = torch.tensor([[0] * 10 + [1] * 10 + [-1] * 4, [0] * 24])
    mask = torch.cat([one_row(24, [(4, 9), (10, 13), (15, 23)]), one_row(24, [(3, 3), (20, 22)])])
    usable = [{4, 5, 6, 7, 8, 10, 11, 12, 15, 16, 17, 18}, {20, 21}]
    for count in (1, 2, 5, 40):
        seeds = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
        anchors, valid = train.sample_anchors(mask, documents, count, seeds)
        for row, good, allowed in zip(anchors, valid, usable):
            found = row[good].tolist()
            assert found == sorted(set(found)) and set(found) <= allowed
            assert len(found) == min(count, len(allowed))

@functools.cache
def batch_of_two(mask_seed=0):
    """Two rows, packed documents, padding, gaps in the loss mask -> tensors for dspark_loss."""
    target, r, size = make_target(), torch.Generator().manual_seed(21), 26
    ids = torch.randint(0, V, (2, size), generator=r)
    documents = torch.tensor([[0] * 12 + [1] * 14, [0] * 18 + [-1] * 8])
    positions = torch.tensor([[*range(12), *range(14)], [*range(18), *[0] * 8]])
    mask = torch.cat([one_row(size, [(3, 11), (16, 18), (20, 25)]), one_row(size, [(5, 17)])])
    features, last, logits = (torch.zeros(2, size, n) for n in (64, 32, V))
    for row, number in ((0, 0), (0, 1), (1, 0)):
        here = (documents[row] == number).nonzero()[:, 0]
        for whole, part in zip((features, last, logits), states_of(target, ids[row, here])):
            whole[row, here] = part[0]
    anchors = torch.tensor([[3, 9, 10, 16, 22, 24], [5, 8, 15, 16, 0, 0]])
    valid = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    return features, last, ids, mask, anchors, valid, documents, positions, logits

def slots_of(draft, ids, mask, anchors, valid, documents):
    """The supervised slots, one by one: (b, n, k, index of the predicted token, rank in the block)"""
    shift = draft.config.gamma - draft.config.block_size + 1  # 1 if the anchor's slot predicts
    for b, n in valid.nonzero().tolist():
        a = int(anchors[b, n])
        for i in range(draft.config.gamma):
            at = a + 1 + i
            if at >= ids.shape[1] or not mask[b, at] or documents[b, at] != documents[b, a]:
                break
            yield b, n, i + 1 - shift, at, i

def reference_loss(draft, decay=4.0):
    """The objective as sentences: a loop over slots, float64, logits by the target itself."""
    features, _, ids, mask, anchors, valid, documents, positions, logits = batch_of_two()
    out = draft(features, ids, anchors, valid, documents, positions)
    draft_ids, sums = draft.draft_ids.tolist(), collections.defaultdict(lambda: [0.0, 1e-12])
    for b, n, k, at, i in slots_of(draft, ids, mask, anchors, valid, documents):
        p_d = out.logits[b, n, k].double().softmax(-1)
        p_t = logits[b, at - 1].double().softmax(-1)[draft_ids]
        rate, token, weight = torch.minimum(p_d, p_t).sum(), int(ids[b, at]), math.exp(-i / decay)
        bce = F.binary_cross_entropy_with_logits(
            out.confidence_logits[b, n, k].double(), rate.detach())
        terms = {"tv": 1 - torch.minimum(p_d, p_t / p_t.sum()).sum(), "confidence": bce}
        if token in draft_ids:
            terms["ce"] = -p_d[draft_ids.index(token)].log()
        for name, value in terms.items():
            sums[name][0], sums[name][1] = sums[name][0] + weight * value, sums[name][1] + weight
    means = {name: top / bottom for name, (top, bottom) in sums.items()}
    return 0.1 * means["ce"] + 0.9 * means["tv"] + means["confidence"], means

def gradients(draft, loss):
    draft.zero_grad()
    loss.backward()
    return {name: weight.grad.clone() for name, weight in draft.named_parameters()}

def assert_same_gradients(one, other, relative):
    for name in one:
        gap = (one[name] - other[name]).norm() / other[name].norm().clamp(min=1e-6)
        assert gap < relative, (name, float(gap))

@pytest.mark.parametrize("from_anchor", [True, False])
@pytest.mark.parametrize("ids", [None, DRAFT_IDS], ids=["whole", "reduced"])
def test_the_loss_is_the_objective_of_the_paper(from_anchor, ids):
    """Pitfalls 2, 3, 4, 5, 8: labels, masks, weights, the target's own logits; no gradient for the
    target (pitfall 9)."""
    import train

    target = make_target()
    draft = make_draft(target, sample_from_anchor=from_anchor, draft_ids=ids)
    loss, metrics = train.dspark_loss(draft, *batch_of_two()[:-1])
    expected, means = reference_loss(draft)
    assert float(loss) == pytest.approx(float(expected), abs=2e-5)
    for name, value in means.items():
        assert float(metrics[name]) == pytest.approx(float(value), abs=2e-5)
    assert_same_gradients(gradients(draft, loss), gradients(draft, expected), 1e-4)
    assert all(weight.grad is None for weight in target.parameters())

@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_the_loss_in_chunks_is_the_plain_loss(chunk):
    """Value, metrics and gradients, scaled by whatever backward brings."""
    import train

    draft, batch = make_draft(make_target(), draft_ids=DRAFT_IDS, markov_head_type="rnn"), batch_of_two()
    plain, metrics = train.dspark_loss(draft, *batch[:-1])
    loss, same = train.dspark_loss(draft, *batch[:-1], chunk_blocks=chunk)
    assert float(loss) == pytest.approx(float(plain), rel=1e-5) and set(metrics) == set(same)
    for name in metrics:
        assert float(same[name]) == pytest.approx(float(metrics[name]), rel=1e-5)
    assert_same_gradients(gradients(draft, 3 * loss), gradients(draft, 3 * plain), 1e-5)

@pytest.mark.parametrize("chunk", [None, 2])
def test_dummy_anchors_change_nothing(chunk):
    """Pitfall 8: padding by invalid anchors, wherever they point; none valid is no NaN."""
    import train

    draft, (features, last, ids, mask, anchors, valid, documents, positions, _) = (
        make_draft(make_target()), batch_of_two())
    def run(anchors, valid):
        return train.dspark_loss(draft, features, last, ids, mask, anchors, valid, documents,
                                 positions, chunk_blocks=chunk)
    loss, metrics = run(anchors, valid)
    junk = torch.tensor([[0, 7, 25], [1, 20, 25]])
    more, same = run(torch.cat([anchors, junk], 1), torch.cat([valid, junk < 0], 1))
    assert float(more) == pytest.approx(float(loss), rel=1e-5)
    for name in metrics:
        assert float(same[name]) == pytest.approx(float(metrics[name]), rel=1e-5)
    assert_same_gradients(gradients(draft, more), gradients(draft, loss), 1e-5)
    assert torch.isfinite(run(anchors, valid & False)[0])

def test_asking_for_more_anchors_than_there_are_changes_nothing():
    """Pitfall 8: 99 anchors asked for equal exactly the valid number asked for."""
    import train

    draft = make_draft(make_target())
    row = [x[:1] for x in batch_of_two()[:-1]]
    values = []
    for count in (99, 15):
        anchors, valid = train.sample_anchors(row[3], row[6], count, [torch.Generator().manual_seed(0)])
        assert int(valid.sum()) == 15
        values.append(float(train.dspark_loss(draft, *row[:4], anchors, valid, *row[6:])[0]))
    assert values[0] == pytest.approx(values[1], rel=1e-6)

def late_training_logits():
    """Draft and target that agree almost everywhere, as bf16 logits [M, K, V]."""
    r = torch.Generator().manual_seed(13)
    logits = 6 * torch.randn(16, 4, 400, generator=r)
    near = logits + 0.05 * torch.randn(logits.shape, generator=r)
    return logits.bfloat16(), near.bfloat16(), torch.randint(0, 400, (16, 4), generator=r)

@pytest.mark.parametrize("name", ["ce", "tv", "kl_div"])
def test_terms_are_float32_under_autocast(name):
    """Pitfall 6: from the same bf16 logits, within 2 % of the float64 gradient."""
    import train

    logits, teacher, labels = late_training_logits()
    leaf, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        terms = train.slot_terms(leaf, teacher, labels, torch.arange(400))
    assert terms[name].dtype == torch.float32
    terms[name].sum().backward()
    log_d, log_t = exact.log_softmax(-1), teacher.double().log_softmax(-1)
    value = {"ce": -log_d.gather(-1, labels[..., None]), "kl_div": log_t.exp() * (log_t - log_d),
             "tv": -torch.minimum(log_d.exp(), log_t.exp())}[name]
    value.sum().backward()
    assert (leaf.grad.double() - exact.grad).norm() < 0.02 * exact.grad.norm()

def test_the_whole_loss_is_float32_under_autocast():
    """Pitfall 6, end to end: only the draft's own matrix products are bf16."""
    import train

    draft = make_draft(make_target())
    full, _ = train.dspark_loss(draft, *batch_of_two()[:-1])
    with torch.autocast("cpu", torch.bfloat16):
        half, _ = train.dspark_loss(draft, *batch_of_two()[:-1], chunk_blocks=2)
    assert half.dtype == torch.float32
    assert float(half) == pytest.approx(float(full), rel=0.02)
    assert all(torch.isfinite(x).all() for x in gradients(draft, half).values())

@pytest.mark.parametrize("from_anchor, head", [(True, "vanilla"), (False, "rnn")])
def test_one_overfitted_sample_is_drafted_almost_perfectly(from_anchor, head):
    """Pitfall 2: what training teaches is what decoding asks, slot 0 and the Markov token too."""
    import train

    target, prompt, budget = make_target(), [7, 1, 30], 10 * GAMMA + 11
    draft = DSparkDraft.from_target(
        target, num_hidden_layers=1, block_size=GAMMA + 1 - from_anchor, markov_rank=6,
        target_layer_ids=[0, 2], sample_from_anchor=from_anchor, markov_std=0.1, **HEADS[head])
    text = texts(generate(target, None, [prompt], budget + GAMMA))[0]
    assert len(set(text)) > 15  # not a text that repeats itself
    ids = torch.tensor([prompt + text])
    features, last, _ = states_of(target, ids[0])
    mask = one_row(ids.shape[1], [(len(prompt), ids.shape[1] - 1)])
    anchors, valid = train.sample_anchors(
        mask, torch.zeros_like(ids), 999, [torch.Generator().manual_seed(0)])
    optimizer = torch.optim.Adam(draft.parameters(), lr=1e-2)
    for _ in range(120):
        optimizer.zero_grad()
        loss, metrics = train.dspark_loss(draft, features, last, ids, mask, anchors, valid)
        loss.backward()
        optimizer.step()
    one = generate(target, draft, [prompt], budget)[0]
    assert one.tokens == text[:budget]
    assert one.accepted_length > draft.config.gamma + 0.8

def test_teacher_states_give_the_targets_logits():
    """Pitfall 5: what the trainer takes from its packed forward, against the target alone."""
    import train

    target, sizes = make_target(), (9, 4, 13)
    documents = [dict(ids=[(7 * i + n) % V for i in range(n)], start=1, number=n) for n in sizes]
    states = train.TargetStates(target, [0, 2], 1)
    features, last = states([documents[:2], documents[2:]], 15)
    for row, at, document in ((0, 0, documents[0]), (0, 9, documents[1]), (1, 0, documents[2])):
        part = slice(at, at + len(document["ids"]))
        tapped, _, logits = states_of(target, document["ids"])
        torch.testing.assert_close(features[row, part], tapped[0], **CLOSE)
        mine = last[row, part] @ target.get_output_embeddings().weight.T
        torch.testing.assert_close(mine, logits[0], **CLOSE)
