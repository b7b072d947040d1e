"""Train a DSpark draft: conversations in, checkpoint out (arXiv 2607.05147, sec. 3.3).

    conversations -> the target's chat template -> the target's OWN answers (its words are what the
    draft must guess) -> hidden states of the frozen target, computed online -> random anchors ->
    the loss of eq. 9-12 -> decoding of held-out prompts for real -> checkpoint

    python train.py --tiny                      no download: synthetic dialogues, about three minutes
    python train.py                             Qwen3-0.6B on ShareGPT
    python train.py --verifier-name-or-path FOLDER --data FILE.json   anything local

Shapes are named as in dspark.py.
"""
import argparse
import collections
import hashlib
import json
import math
import os
import pathlib
import random
import shutil
import sys
import time

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from tqdm import tqdm

import dspark
from dspark import DSparkDraft, Stopwatch, generate, require, total

# ----------------------------------------------------------------------------- the objective (3.3)

def sample_anchors(loss_mask, document_ids, count, generators):
    """Random anchors per row, sorted. A valid anchor and the token after it are both supervised:
    when decoding, the last prompt token is never an anchor and a draft never starts a new document.

    loss_mask, document_ids [B, S]; one generator per row -> anchors, valid [B, N], N <= count
    """
    follows = (document_ids[:, :-1] == document_ids[:, 1:]) & (document_ids[:, 1:] >= 0)
    usable = loss_mask[:, :-1].bool() & loss_mask[:, 1:].bool() & follows
    rows = [row.nonzero()[:, 0] for row in usable.cpu()]
    rows = [row[torch.randperm(len(row), generator=g)[:count]].sort().values
            for row, g in zip(rows, generators)]
    width = max(1, *map(len, rows))
    anchors = torch.stack([F.pad(row, (0, width - len(row))) for row in rows])  # [B, N]
    valid = torch.arange(width) < torch.tensor([len(row) for row in rows])[:, None]
    return anchors.to(loss_mask.device), valid.to(loss_mask.device)

def slot_labels(config, input_ids, loss_mask, anchors, anchor_valid, document_ids=None):
    """Which token each slot predicts, and whether it is supervised: the token must be an assistant
    token of the anchor's document, and so must those of all earlier predicting slots.

    Assistant span 8..39, block 4, anchor 37, sampling from the anchor: slots predict tokens 38, 39,
    40, 41 -> supervised [1, 1, 0, 0].   -> index [B, N, K], supervised bool [B, N, K]
    """
    length, slot = input_ids.shape[1], torch.arange(config.block_size, device=anchors.device)
    index = anchors[..., None] + slot + 1 - config.first_slot  # [B, N, K]
    inside, index = index < length, index.clamp(max=length - 1)
    supervised = loss_mask.gather(1, index.flatten(1)).view(index.shape).bool() & inside
    if document_ids is not None:
        there = document_ids.gather(1, index.flatten(1)).view(index.shape)
        supervised &= there == document_ids.gather(1, anchors)[..., None]
    predicts = slot >= config.first_slot
    prefix = (supervised | ~predicts).long().cumprod(-1).bool()
    return index, prefix & predicts & anchor_valid[..., None]

def slot_terms(logits, target_logits, labels, draft_ids, names=("ce", "tv", "kl_div")):
    """The terms of one slot each, in float32 (bf16 softmaxes cost up to 31 % gradient error).

    logits [M, K, D], target_logits [M, K, V], labels [M, K] target ids, draft_ids [D] -> {name:
    [M, K]}: ce (eq. 9; 0 where the true token has no draft id), tv = 1 - sum min(p_d, p_t), half the
    L1 distance that eq. 10 weighs, kl_div, and accept = c* (eq. 8), which takes p_t over all of V.
    """
    log_d, scores = logits.float().log_softmax(-1), target_logits.float()
    p_d, terms = log_d.exp(), {}
    log_t = scores - scores.logsumexp(-1, keepdim=True)  # over all of V
    if len(draft_ids) < scores.shape[-1]:
        log_t = log_t[..., draft_ids]  # [M, K, D]
    terms["accept"] = torch.minimum(p_d, log_t.exp()).sum(-1)
    if "ce" in names:
        column = torch.searchsorted(draft_ids, labels).clamp(max=len(draft_ids) - 1)
        has_id = draft_ids[column] == labels
        terms["ce"] = -log_d.gather(-1, column[..., None])[..., 0] * has_id
    if "tv" in names or "kl_div" in names:
        log_t = log_t.log_softmax(-1)  # renormalised over the draft vocabulary
        terms["tv"] = 1 - torch.minimum(p_d, log_t.exp()).sum(-1)
    if "kl_div" in names:
        terms["kl_div"] = (log_t.exp() * (log_t - log_d)).sum(-1)
    return terms

class DeliverGradients(torch.autograd.Function):
    """Gradients that were computed chunk by chunk, handed on when loss.backward() asks for them."""
    @staticmethod
    def forward(ctx, loss, gradients, *inputs):
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx, scale):
        return None, None, *(x if x is None else x * scale for x in ctx.gradients)

def block_loss(draft, hidden, blocks, loss_fn, confidence_alpha, norms):
    """Share of M blocks in the loss (eq. 9-12) and their metric sums. hidden [M, K, d]"""
    prev, labels, teacher, weight, supervised, has_id = blocks
    logits, confidence = draft.heads(hidden, prev)
    with torch.autocast(hidden.device.type, enabled=False):
        head = draft.target_head
        target_logits = F.linear(teacher.flatten(0, 1).to(head.dtype), head)
        target_logits = target_logits.unflatten(0, teacher.shape[:2])  # [M, K, V]
        terms = slot_terms(logits, target_logits, labels, draft.draft_ids, tuple(loss_fn))
        rate = terms.pop("accept").detach()  # c*, eq. 8
        if confidence is not None:
            terms["confidence"] = F.binary_cross_entropy_with_logits(
                confidence.float(), rate.clamp(0, 1), reduction="none")  # eq. 11
        sums = {name: (weight * term).sum() for name, term in terms.items()}
    scale = dict(loss_fn, confidence=confidence_alpha)
    loss = sum(scale.get(name, 0.0) * value / norms.get(name, norms["all"])
               for name, value in sums.items())  # eq. 12
    sums = {name: value.detach() for name, value in sums.items()}
    survive = (rate * supervised).cumprod(1) * supervised
    return loss, dict(sums, rate=(rate * supervised).sum(0), tau=survive.sum())

def dspark_loss(draft, features, target_hidden, input_ids, loss_mask, anchors, anchor_valid,
                document_ids=None, position_ids=None, loss_fn=None, decay=4.0, confidence_alpha=1.0,
                chunk_blocks=None):
    """0.1 CE + 0.9 TV + alpha BCE(c, c*), weighted means over supervised slots (eq. 9-12).

    features [B, S, n d]; target_hidden [B, S, d], the target's last states AFTER its final norm;
    input_ids, loss_mask [B, S]; anchors, anchor_valid [B, N] -> loss, metrics {ce, tv, kl_div,
    confidence, accept@k, tau, ...}. Slot i weighs exp(-i / decay), as in both public codes.
    chunk_blocks: how many blocks' [K, V] tensors exist at a time; the result is the same.
    """
    loss_fn, config = loss_fn or {"ce": 0.1, "tv": 0.9}, draft.config
    unknown = set(loss_fn) - {"ce", "tv", "kl_div"}
    require(not unknown, f"loss_fn knows ce, tv and kl_div, got {sorted(unknown)}")
    hidden = draft.backbone(features, input_ids, anchors, document_ids, position_ids)
    index, supervised = slot_labels(
        config, input_ids, loss_mask, anchors, anchor_valid, document_ids)
    keep = supervised.any(-1)  # [B, N]: dummies and empty blocks never reach the heads
    row = torch.arange(len(input_ids), device=index.device)[:, None, None]
    labels, teacher = input_ids[row, index][keep], target_hidden[row, index - 1][keep]
    prev = draft.previous_tokens(input_ids, anchors)[keep]
    supervised, hidden = supervised[keep], hidden[keep]  # [M, K], [M, K, d]
    slot = torch.arange(config.block_size, device=index.device) - config.first_slot
    weight = supervised * torch.exp(-slot.clamp(min=0) / decay)
    has_id = torch.isin(labels, draft.draft_ids)
    norms = {"all": weight.sum().clamp(min=1e-8), "ce": (weight * has_id).sum().clamp(min=1e-8)}
    blocks = (prev, labels, teacher, weight, supervised, has_id)
    if chunk_blocks is None or not torch.is_grad_enabled():
        loss, sums = block_loss(draft, hidden, blocks, loss_fn, confidence_alpha, norms)
    else:
        loss, sums = chunked_loss(
            draft, hidden, blocks, loss_fn, confidence_alpha, norms, chunk_blocks)
    counts = supervised.sum(0)
    metrics = {name: sums[name] / norms.get(name, norms["all"])
               for name in sums if name not in ("rate", "tau")}
    metrics["tau"] = 1 + sums["tau"] / max(1, len(supervised))
    for k in range(config.first_slot, config.block_size):
        metrics[f"accept@{k + 1 - config.first_slot}"] = sums["rate"][k] / counts[k].clamp(min=1)
    metrics.update(slots=counts.sum(), without_draft_id=(supervised & ~has_id).sum())
    return loss, metrics

def chunked_loss(draft, hidden, blocks, loss_fn, confidence_alpha, norms, chunk_blocks):
    """The loss forward and backward, chunk by chunk, on detached states; one backward then runs
    through the backbone. No recomputation, and never more than one chunk of [K, V] tensors."""
    params = [p for head in (draft.markov_head, draft.confidence_head) if head is not None
              for p in head.parameters() if p.requires_grad]
    totals, loss, hidden_grads, grads = {}, 0.0, [], [None] * len(params)
    for start in range(0, len(hidden), chunk_blocks):
        part = slice(start, start + chunk_blocks)
        states = hidden[part].detach().requires_grad_()
        share, sums = block_loss(draft, states, [x[part] for x in blocks], loss_fn,
                                 confidence_alpha, norms)
        first, *rest = torch.autograd.grad(share, [states, *params], allow_unused=True)
        hidden_grads.append(first)
        grads = [b if a is None else a if b is None else a + b for a, b in zip(grads, rest)]
        loss = loss + share.detach()
        totals = {name: totals.get(name, 0) + value for name, value in sums.items()}
    inputs = [torch.cat(hidden_grads), *grads]
    return DeliverGradients.apply(loss, inputs, hidden, *params), totals

# ---------------------------------------------------------------------------------- conversations

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
         "chatgpt": "assistant", "bing": "assistant", "bard": "assistant", "model": "assistant",
         "system": "system", "tool": "tool", "observation": "tool", "function": "tool"}
HUB_SETS = {"sharegpt": "Aeala/ShareGPT_Vicuna_unfiltered"}
NO_HUB = ("cannot get {0!r} from the model hub. Without one, try `python train.py --tiny` (no download), "
          "or give local folders: --verifier-name-or-path FOLDER --data FILE.json")

def read_rows(source):
    """Rows of a JSON or JSON Lines file, or of a hub data set."""
    path = pathlib.Path(source)
    if path.suffix not in (".json", ".jsonl"):
        import datasets  # slow to import, and only hub data sets need it

        try:
            return datasets.load_dataset(HUB_SETS.get(source, source), split="train")
        except (OSError, ValueError, RuntimeError) as error:
            raise ValueError(NO_HUB.format(HUB_SETS.get(source, source))) from error
    require(path.is_file(), f"--data {source}: no such file")
    text = path.read_text(encoding="utf-8-sig")
    if text.lstrip().startswith("["):
        return json.loads(text)
    return [json.loads(line) for line in text.splitlines() if line.strip()]

def conversation(row):
    """A row in ShareGPT's, OpenAI's or the prompt spelling -> [{role, content}], or why it is skipped."""
    if not isinstance(row, dict):
        return None, "row is not an object"
    if "turns" in row or "prompt" in row:
        texts = row.get("turns") or [row["prompt"]]
        turns = [{"from": "user", "value": text} for text in texts[:1]]
    else:
        turns = row.get("conversations") or row.get("messages")
    if not isinstance(turns, list) or not turns:
        return None, "no conversation"
    if isinstance(row.get("system"), str) and row["system"].strip():
        turns = [{"from": "system", "value": row["system"]}, *turns]
    found = []
    for turn in turns:
        if not isinstance(turn, dict):
            return None, "entry is not a turn"
        role, text = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
        if not isinstance(text, str):
            return None, "text is missing or not a string"
        if role not in ROLES:
            return None, f"unknown role {role!r}"
        found.append({"role": ROLES[role], "content": text})
    while found and found[0]["role"] == "assistant":
        found.pop(0)  # ShareGPT is cut anywhere; nothing can be asked of an answer without a question
    if not any(turn["role"] == "user" for turn in found):
        return None, "no user turn"
    return found, None

def render(tokenizer, turns, thinking):
    """Token ids of the target's chat template up to where its answer begins; None if refused."""
    if tokenizer.chat_template is None:
        text = "\n".join(turn["content"] for turn in turns)
        return tokenizer(text).input_ids
    try:
        return tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=True,
                                             return_dict=False, enable_thinking=thinking)
    except Exception as error:  # a template may raise anything; each refusal is counted, none is lost
        if type(error).__name__ not in ("TemplateError", "UndefinedError", "TypeError", "ValueError"):
            raise
        return None

def stop_ids(target, tokenizer):
    """All ids that end a turn: the generation config's and the tokenizer's."""
    ids = target.generation_config.eos_token_id
    ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
    return sorted({*ids, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])})

def dataset_documents(rows, tokenizer, args, skipped):
    """One document per assistant turn of the file, as (prompt ids, answer ids)."""
    for row in rows:
        turns, reason = conversation(row)
        if turns is None:
            skipped[reason] += 1
            continue
        for i, turn in enumerate(turns):
            if turn["role"] != "assistant":
                continue
            prompt = render(tokenizer, turns[:i], args.enable_thinking)
            if prompt is None or not turn["content"].strip():
                skipped["template refused" if prompt is None else "empty answer"] += 1
                continue
            answer = tokenizer(turn["content"], add_special_tokens=False).input_ids
            yield prompt, [*answer, tokenizer.eos_token_id]

def target_documents(rows, target, tokenizer, args, skipped):
    """One document per user turn; the target answers, turn after turn, in its own words."""
    talks = []
    for row in rows:
        turns, reason = conversation(row)
        if turns is None:
            skipped[reason] += 1
        else:
            asked = [turn for turn in turns if turn["role"] in ("user", "system")]
            talks.append((asked, []))  # questions still to ask, what was said so far
    documents, store = [], AnswerStore(target, tokenizer, args)
    while talks:
        prompts = []
        for asked, said in talks:
            said.append(asked.pop(0))
            while asked and said[-1]["role"] == "system":
                said.append(asked.pop(0))
            prompts.append(render(tokenizer, said, args.enable_thinking))
        fits = [p is not None and len(p) + 2 <= args.total_seq_len for p in prompts]
        skipped["template refused or prompt too long"] += len(fits) - sum(fits)
        talks = [talk for talk, fit in zip(talks, fits) if fit]
        prompts = [prompt for prompt, fit in zip(prompts, fits) if fit]
        answers = store.answer(prompts)
        documents += zip(prompts, answers)
        for (_, said), answer in zip(talks, answers):
            text = tokenizer.decode(answer, skip_special_tokens=True)
            said.append({"role": "assistant", "content": text})
        talks = [talk for talk in talks if talk[0]]
    cut = sum(answer[-1] not in store.stops for _, answer in documents)
    print(f"answers: {len(documents)} written by the target, {cut} of them cut at "
          f"{args.answer_max_new_tokens} tokens (no end of turn is taught there)")
    return documents

class AnswerStore:
    """The target's answers, kept on disk under a hash of all that decides them, one line each: a run
    that was killed goes on where it stopped."""
    def __init__(self, target, tokenizer, args):
        self.target, self.args, self.stops = target, args, stop_ids(target, tokenizer)
        config = target.generation_config
        self.sampling = dict(temperature=1.0, top_k=0, top_p=1.0)
        if getattr(config, "do_sample", False):
            self.sampling.update(temperature=config.temperature or 1.0, top_k=config.top_k or 0,
                                 top_p=config.top_p or 1.0)
        if args.answer_temperature is not None:
            self.sampling["temperature"] = args.answer_temperature
        name = str(target.config._name_or_path or "")
        shape = [name, target.config.num_hidden_layers, target.config.hidden_size]
        self.salt = json.dumps([shape, self.sampling, args.answer_max_new_tokens, args.seed])
        self.path = pathlib.Path(args.answer_file or pathlib.Path(args.save_path) / "answers.jsonl")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.known = {}
        for line in self.path.read_text().splitlines() if self.path.exists() else ():
            if line.endswith("]}"):  # the last line may be half written
                self.known.update(json.loads(line))

    def key(self, prompt, copy):
        return hashlib.sha256(f"{self.salt}{prompt}{copy}".encode()).hexdigest()[:24]

    def answer(self, prompts):
        """Answers in the order of the prompts; the new ones in packed batches, short ones first."""
        seen, keys = collections.Counter(), []
        for prompt in prompts:  # the same prompt twice gets two answers
            keys.append(self.key(prompt, seen[tuple(prompt)]))
            seen[tuple(prompt)] += 1
        todo = {key: prompt for key, prompt in zip(keys, prompts) if key not in self.known}
        todo = sorted(todo.items(), key=lambda item: (len(item[1]), item[0]))
        bar = tqdm(total=len(todo), desc="target's answers", unit="answer", disable=not todo)
        with self.path.open("a") as file, bar:
            for start in range(0, len(todo), 512):
                self.write(todo[start : start + 512], file, bar)
        return [self.known[key] for key in keys]

    def write(self, group, file, bar):
        budget = self.args.answer_max_new_tokens
        slots = len(group[-1][1]) + budget
        rows = max(1, min(self.args.answer_batch, self.args.answer_batch * 1024 // slots))
        generator = torch.Generator().manual_seed(int(group[0][0][:12], 16))

        def keep(one):
            self.known[group[one.index][0]] = one.tokens
            file.write(json.dumps({group[one.index][0]: one.tokens}) + "\n")
            file.flush()
            bar.update()

        generate(self.target, None, [prompt for _, prompt in group], budget, **self.sampling,
                 stop_token_ids=self.stops, max_concurrency=rows, generator=generator, on_done=keep)

# --------------------------------------------------------------- rows, features of the target

def documents_of(pairs, args, skipped):
    """(prompt ids, answer ids) -> documents {ids, start}; truncated at total_seq_len."""
    documents = []
    for prompt, answer in pairs:
        ids = [*prompt, *answer][: args.total_seq_len]
        if len(ids) - len(prompt) < 2:  # an anchor and the token after it
            skipped["fewer than two answer tokens inside the sequence length"] += 1
        else:
            documents.append({"ids": ids, "start": len(prompt), "number": len(documents)})
    return documents

def pack_rows(documents, length):
    """Documents in the given order -> rows of at most `length` tokens; the first row with room."""
    rows, room = [], []
    for document in documents:
        size = len(document["ids"])
        fit = next((i for i, free in enumerate(room) if free >= size), None)
        if fit is None:
            rows.append([])
            room.append(length)
            fit = len(rows) - 1
        rows[fit].append(document)
        room[fit] -= size
    return rows

def collate(rows, device):
    """Rows of documents -> input_ids, loss_mask, document_ids, position_ids [B, S]; -1 = padding."""
    width = max(sum(len(document["ids"]) for document in row) for row in rows)
    batch = torch.zeros(4, len(rows), width, dtype=torch.long)
    batch[2] = -1
    for b, row in enumerate(rows):
        at = 0
        for number, document in enumerate(row):
            size = len(document["ids"])
            part = batch[:, b, at : at + size]
            part[0], part[2] = torch.tensor(document["ids"]), number
            part[1, document["start"] :] = 1
            part[3] = torch.arange(size)
            at += size
    return batch.to(device)

class TargetStates:
    """Hidden states of the frozen target: one packed forward for all documents of a batch. They are
    kept in memory for the next epoch while they fit into feature_cache_gb."""
    def __init__(self, target, layer_ids, gigabytes):
        layers = target.config.num_hidden_layers
        self.target, self.layer_ids, self.kept = target, [*layer_ids, layers - 1], {}
        self.room = gigabytes * 1e9

    @torch.no_grad()
    def compute(self, documents):
        """-> per document [S, (n + 1) d]: the tapped layers, then the last one after its norm"""
        counts, device = [len(document["ids"]) for document in documents], self.target.device
        plan = dspark.make_plan(0, [0] * len(counts), counts, device)
        cache = dspark.RaggedCache(len(counts), max(counts))
        ids = torch.tensor([x for document in documents for x in document["ids"]], device=device)
        with dspark.packed(self.target):
            _, states = dspark.run_target(self.target, cache, self.layer_ids, ids, plan, ids[:1] * 0)
        return states.split(counts)

    def __call__(self, rows, width):
        """Rows of documents -> features [B, S, n d], target_hidden [B, S, d]"""
        documents = [document for row in rows for document in row]
        new = [document for document in documents if document["number"] not in self.kept]
        states = dict(zip((x["number"] for x in new), self.compute(new))) if new else {}
        out = []
        for row in rows:
            parts = [states.get(x["number"], self.kept.get(x["number"])) for x in row]
            joined = torch.cat([part.to(self.target.device) for part in parts])
            out.append(F.pad(joined, (0, 0, 0, width - len(joined))))
        for number, state in states.items():
            if self.room > state.nbytes:
                self.room -= state.nbytes
                self.kept[number] = state.clone()  # split() gives views of the whole batch
        d = self.target.config.hidden_size
        return torch.stack(out).split([(len(self.layer_ids) - 1) * d, d], -1)

def draft_vocabulary(documents, size, stops, rows):
    """The most frequent supervised tokens (ties by smaller id), always the end-of-turn ids, filled
    up with the smallest unused ids -> ascending ids [D], or None for the whole vocabulary."""
    if not size or size >= rows:
        return None
    counts = collections.Counter(x for doc in documents for x in doc["ids"][doc["start"] :])
    ranked = sorted(counts, key=lambda token: (-counts[token], token))
    chosen = dict.fromkeys([*stops, *ranked, *range(rows)])  # ordered, without repeats
    ids = sorted(list(chosen)[:size])
    covered = sum(counts[token] for token in ids) / max(1, sum(counts.values()))
    print(f"draft vocabulary: {size} of {rows} ids, {covered:.2%} of the supervised tokens")
    return torch.tensor(ids)

# --------------------------------------------------------------------------------------- training

def init_from_target(draft, target):
    """Start from what the target knows: its last layers, its final norm, its last tapped state."""
    base, count = target.base_model, len(draft.layers)
    require(hasattr(base, "layers") and hasattr(base, "norm"), "--init-from-target needs a target "
            f"with layers and norm, got {type(target).__name__}")
    copied = 0
    for layer, source in zip(draft.layers, base.layers[-count:]):
        own, theirs = layer.state_dict(), source.state_dict()
        same = [name for name in own if name in theirs and own[name].shape == theirs[name].shape]
        layer.load_state_dict({name: theirs[name] for name in same}, strict=False)
        copied += len(same)
    with torch.no_grad():
        draft.fc.weight.zero_()
        draft.fc.weight[:, -len(draft.fc.weight) :].fill_diagonal_(1)
        draft.hidden_norm.weight.copy_(base.layers[-count].input_layernorm.weight)
        draft.norm.weight.copy_(base.norm.weight)
    print(f"draft starts from the target's last {count} layers ({copied} tensors), fc from its last tap")

def seeded(*parts):
    """The one rule for random draws: a generator seeded by (seed, epoch, sample id, ...)."""
    digest = hashlib.sha256(json.dumps(parts).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))

def learning_rate(step, steps, args):
    """Linear warm-up, then cosine to zero."""
    warm = max(1, round(args.warmup_ratio * steps))
    if step < warm:
        return args.lr * (step + 1) / warm
    return args.lr * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))

class Trainer:
    """The training loop and its state: draft, optimiser, position in the data."""
    def __init__(self, draft, target, documents, args, folder):
        self.draft, self.documents, self.args, self.folder = draft, documents, args, folder
        self.states = TargetStates(target, draft.config.target_layer_ids, args.feature_cache_gb)
        self.optimizer = torch.optim.AdamW(draft.parameters(), lr=args.lr, weight_decay=0.0)
        per_epoch = -(-len(self.rows_of(0)) // args.batch_size)
        self.step, self.steps = 0, args.max_steps or args.epochs * per_epoch
        self.best, self.skipped = -1.0, 0
        folder.mkdir(parents=True, exist_ok=True)

    def rows_of(self, epoch):
        order = torch.randperm(len(self.documents), generator=seeded(self.args.seed, epoch))
        return pack_rows([self.documents[i] for i in order], self.args.total_seq_len)

    def batches(self):
        """Epoch after epoch, the same rows whenever the run is started again."""
        number, epoch = 0, 0
        while True:
            rows = self.rows_of(epoch)
            for start in range(0, len(rows), self.args.batch_size):
                if number >= self.step:
                    yield epoch, rows[start : start + self.args.batch_size]
                number += 1
            epoch += 1

    def losses(self, epoch, rows):
        """One batch -> loss (None without an anchor), metrics"""
        args, device = self.args, self.draft.fc.weight.device
        batch = collate(rows, device)
        input_ids, loss_mask, document_ids, position_ids = batch
        generators = [seeded(args.seed, epoch, row[0]["number"]) for row in rows]
        anchors, valid = sample_anchors(loss_mask, document_ids, args.max_anchors, generators)
        if not valid.any():
            return None, {}
        features, hidden = self.states(rows, input_ids.shape[1])
        with torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16"):
            return dspark_loss(
                self.draft, features, hidden, input_ids, loss_mask, anchors, valid, document_ids,
                position_ids, args.loss_fn, args.dflash_decay_gamma, args.confidence_head_alpha,
                args.chunk_blocks)

    def update(self, epoch, rows):
        """One optimiser step -> metrics, or None where the batch had no anchor."""
        loss, metrics = self.losses(epoch, rows)
        if loss is None:
            self.skipped += 1
            return None
        bad = [name for name, value in metrics.items() if not torch.isfinite(torch.as_tensor(value))]
        require(torch.isfinite(loss) and not bad, f"step {self.step}: loss {float(loss)}, terms {bad} "
                "are not finite; lower --lr")
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.steps, self.args)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.draft.parameters(), 1.0)
        self.optimizer.step()
        return {"loss": float(loss), **{name: float(value) for name, value in metrics.items()}}

    def run(self, evaluate):
        """Train to the last step; log, decode held-out prompts and save on the way."""
        args, started, tokens = self.args, time.time(), 0
        bar = tqdm(total=self.steps, initial=self.step, desc="training", unit="step")
        with (self.folder / "metrics.jsonl").open("a") as log, bar:
            for epoch, rows in self.batches():
                if self.step >= self.steps:
                    break
                metrics = self.update(epoch, rows)
                self.step += 1
                bar.update()
                tokens += sum(len(document["ids"]) for row in rows for document in row)
                last = self.step == self.steps
                if metrics and (self.step == 1 or self.step % args.log_every == 0 or last):
                    seconds = time.time() - started
                    line = dict(step=self.step, epoch=epoch, seconds=round(seconds, 2),
                                tokens_per_second=round(tokens / seconds), **metrics)
                    log.write(json.dumps(line) + "\n")
                    log.flush()
                    bar.set_postfix(loss=f"{metrics['loss']:.3f}", tau=f"{metrics['tau']:.2f}")
                if args.eval_every and self.step % args.eval_every == 0 and not last:
                    length = evaluate(self.draft)
                    tqdm.write(f"step {self.step}: accepted length {length:.3f} on held-out prompts")
                    if length > self.best:
                        self.best = length
                        self.save("best")
                if args.checkpoint_every and self.step % args.checkpoint_every == 0:
                    self.save("last")
        if self.skipped:
            print(f"{self.skipped} batches had no anchor and made no step")

    def save(self, name):
        """A whole checkpoint, or none: written beside its place, then renamed."""
        place = self.folder / "checkpoints" / name
        fresh = place.with_name(name + ".tmp")
        shutil.rmtree(fresh, ignore_errors=True)
        self.draft.save_pretrained(fresh)
        moments = {}
        for i, state in self.optimizer.state_dict()["state"].items():
            moments.update({f"{i}.{key}": value for key, value in state.items()})
        save_file(moments, fresh / "optimizer.safetensors")
        facts = dict(step=self.step, best=self.best, steps=self.steps, run=run_key(self.args))
        (fresh / "trainer.json").write_text(json.dumps(facts))
        old = place.with_name(name + ".old")
        shutil.rmtree(old, ignore_errors=True)
        if place.exists():
            os.replace(place, old)
        os.replace(fresh, place)
        shutil.rmtree(old, ignore_errors=True)

    def resume(self, target):
        """Go on from checkpoints/last (or .old, where a save was killed between its two renames)."""
        places = [self.folder / "checkpoints" / name for name in ("last", "last.old")]
        place = next((x for x in places if (x / "trainer.json").exists()), None)
        if place is None:
            print("nothing to resume: starting from the beginning")
            return
        facts = json.loads((place / "trainer.json").read_text())
        require(facts["run"] == run_key(self.args), "--resume: the checkpoint was made with other "
                f"settings: {differences(facts['run'], run_key(self.args))}")
        self.draft.load_state_dict(DSparkDraft.from_pretrained(place, target).state_dict())
        state = self.optimizer.state_dict()
        for name, value in load_file(place / "optimizer.safetensors").items():
            number, key = name.split(".", 1)
            state["state"].setdefault(int(number), {})[key] = value
        self.optimizer.load_state_dict(state)
        self.step, self.best = facts["step"], facts["best"]
        print(f"resumed at step {self.step} of {self.steps}")

def run_key(args):
    """What must not change between a run and its continuation."""
    loose = ("resume", "save_path", "checkpoint_every", "log_every", "eval_every", "feature_cache_gb")
    return {name: value for name, value in sorted(vars(args).items()) if name not in loose}

def differences(old, new):
    return ", ".join(f"{name} {old.get(name)} -> {new.get(name)}"
                     for name in sorted({*old, *new}) if old.get(name) != new.get(name))

# ------------------------------------------------------- evaluation: held-out prompts, decoded for real

def decode(target, draft, prompts, args, temperature, stops, draft_sampling="sample"):
    """Decode the prompts plainly and with the draft, through the same loop -> a dict of results."""
    options = dict(temperature=temperature, stop_token_ids=stops, max_concurrency=args.eval_concurrency)
    numbers = (seeded(args.seed, "evaluation", temperature) for _ in range(2))
    with Stopwatch(target) as plain_seconds:
        plain = generate(target, None, prompts, args.eval_max_new_tokens, generator=next(numbers),
                         **options)
    with Stopwatch(target) as seconds:
        fast = generate(target, draft, prompts, args.eval_max_new_tokens, generator=next(numbers),
                        draft_sampling=draft_sampling, **options)
    counts, rounds = total(fast), max(1, total(fast).rounds)
    rates = {name: sum(len(one.tokens) for one in out) / clock["all"] for name, out, clock in (
        ("plain", plain, plain_seconds), ("speculative", fast, seconds))}
    overhead = seconds["all"] - seconds["target"] - seconds["prefill"]
    return dict(
        accepted_length=counts.accepted_length, rounds=counts.rounds,
        acceptance_by_position=counts.acceptance_by_position,
        conditional_acceptance=counts.conditional_acceptance, tokens_per_second=rates,
        draft_ms=1e3 * overhead / rounds, verify_ms=1e3 * seconds["target"] / rounds,
        plain_ms=1e3 * plain_seconds["target"] / max(1, total(plain).rounds),
        same_text=sum(a.tokens == b.tokens for a, b in zip(plain, fast)), prompts=len(prompts))

def show(name, temperature, result):
    rates = result["tokens_per_second"]
    shares = " ".join(f"{share:.2f}" for share in result["conditional_acceptance"])
    print(f"{name:>14} T={temperature:g}: accepted length {result['accepted_length']:.2f} "
          f"(each draft given those before it: {shares}), {rates['speculative']:.0f} tokens/s against "
          f"{rates['plain']:.0f} plain, {rates['speculative'] / rates['plain']:.2f} times")

class BigramDraft:
    """Baseline: draft from counts of neighbouring tokens alone, through the same loop."""
    def __init__(self, documents, target, gamma, smoothing=0.01):
        size = len(target.get_input_embeddings().weight)
        pairs = torch.tensor([pair for x in documents for pair in zip(x["ids"], x["ids"][1:])])
        table = torch.bincount(pairs[:, 0] * size + pairs[:, 1], minlength=size * size)
        self.logits = (table.view(size, size) + smoothing).log()
        self.config = argparse.Namespace(gamma=gamma, target_layer_ids=())
        self.embed_tokens, self.confidence_head = self.logits, None

    def context_keys_values(self, features, position):
        return []  # it looks at nothing but the previous token

    def propose(self, anchors, position, context, g, uniforms, filters, top, greedy):
        tokens, q = [anchors], []
        for k in range(g):
            logits = self.logits[tokens[-1]]  # [R, V]
            if not greedy:
                q.append(dspark.probabilities(logits, *filters))
            tokens.append(logits.argmax(-1) if greedy else dspark.draw(q[-1], uniforms[:, k]))
        return dspark.Proposal(torch.stack(tokens[1:], 1), torch.stack(q, 1) if q else None, None)

@torch.no_grad()
def entropy_per_token(target, states, documents):
    """Mean entropy, in nats, of the target's next-token distribution inside its own answers."""
    head, sums, count = target.get_output_embeddings().weight, 0.0, 0
    for document in documents:
        hidden = states.compute([document])[0][document["start"] - 1 : -1, -head.shape[1] :]
        log_p = F.linear(hidden, head).float().log_softmax(-1)
        sums -= float((log_p.exp() * log_p).sum())
        count += len(hidden)
    return sums / max(1, count)

# ------------------------------------------------------------ --tiny: a language made on the spot

TINY = dict(save_path="output/tiny", block_size=7, num_layers=2, target_layer_ids=[0, 4, 6],
            draft_vocab_size=0, markov_rank=64, markov_std=0.1, lr=5e-3, max_steps=500, batch_size=8,
            max_anchors=12, total_seq_len=192, loss_fn={"kl_div": 0.5, "tv": 1.0}, max_samples=1024,
            answer_max_new_tokens=110, eval_samples=32, eval_max_new_tokens=110, answer_batch=128,
            chunk_blocks=0, log_every=20)
CHATML = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")

def expand(grammar, text, rng):
    """Replace each <name> by one of its phrases, drawn evenly, until none is left."""
    while "<" in text:
        before, rest = text.split("<", 1)
        name, after = rest.split(">", 1)
        text = before + rng.choice(grammar[name]) + after
    return text

def dialogues(count, seed):
    """Synthetic two-turn dialogues in ShareGPT's spelling."""
    path = pathlib.Path(__file__).with_name("testdata") / "grammar.json"
    grammar, rng = json.loads(path.read_text()), random.Random(seed)
    return [{"conversations": [{"from": who, "value": expand(grammar, grammar[kind], rng)}
                               for who, kind in (("human", "user"), ("gpt", "assistant"))]}
            for _ in range(count)]

def make_tokenizer(rows, vocab_size=900):
    """A byte-level BPE trained on the dialogues, with a ChatML template."""
    from tokenizers import ByteLevelBPETokenizer

    model = ByteLevelBPETokenizer()
    texts = [turn["value"] for row in rows for turn in row["conversations"]]
    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]
    model.train_from_iterator(texts, vocab_size, show_progress=False, special_tokens=marks)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=model._tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>",
        mask_token="<|mask|>", chat_template=CHATML)

def make_target(args, folder, steps=400):
    """Train a small Qwen3 on the dialogues; about a minute on two cores."""
    rows = dialogues(4096, seed=0)
    tokenizer = make_tokenizer(rows)
    args.total_seq_len, wide = 10**6, args.total_seq_len
    pairs = [*dataset_documents(rows, tokenizer, args, collections.Counter())]
    args.total_seq_len = wide
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=320, num_hidden_layers=8,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=1024,
        eos_token_id=tokenizer.eos_token_id, tie_word_embeddings=True)
    target = transformers.Qwen3ForCausalLM(config)
    optimizer = torch.optim.AdamW(target.parameters(), lr=3e-3, weight_decay=0.01)
    warm = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps, pct_start=0.05)
    bar = tqdm(range(steps), desc="tiny target", unit="step")
    for step in bar:
        texts = [torch.tensor([*a, *b]) for a, b in random.Random(step).sample(pairs, 12)]
        ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=-100)
        loss = target(input_ids=ids.clamp(min=0), labels=ids, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(target.parameters(), 1.0)
        optimizer.step()
        warm.step()
        bar.set_postfix(loss=f"{loss.item():.3f}")
    target.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder

# ------------------------------------------------------------------------------- the command line

def parser():
    p = argparse.ArgumentParser(description="Train a DSpark draft for a causal language model.")
    p.error = lambda message: sys.exit(fail(message))
    add = p.add_argument_group("what to train on").add_argument
    add("--tiny", action="store_true", help="no download: synthetic dialogues and a target trained "
        "on the spot (presets for most flags below)")
    add("--verifier-name-or-path", help="target model: hub id or folder [Qwen/Qwen3-0.6B]")
    add("--data", default="sharegpt", help="sharegpt, FILE.json, FILE.jsonl or a hub data set id")
    add("--eval-data", help="FILE with held-out prompts (default: some rows of --data are held out)")
    add("--max-samples", type=int, default=5000, help="use at most this many conversations")
    add("--responses", choices=["target", "dataset"], default="target", help="train on answers that "
        "the target writes itself, or on those of the data")
    add("--answer-max-new-tokens", type=int, default=1024, help="budget of a written answer")
    add("--answer-temperature", type=float, help="default: the target's generation_config, or 1")
    add("--answer-batch", type=int, default=32, help="answers written at a time")
    add("--answer-file", help="where answers are kept [SAVE_PATH/answers.jsonl]")
    add("--enable-thinking", action=argparse.BooleanOptionalAction, default=False,
        help="thinking mode of the chat template; kept in the checkpoint")
    add = p.add_argument_group("the draft").add_argument
    add("--block-size", type=int, default=8, help="slots of a block")
    add("--max-anchors", type=int, default=256, help="blocks per row and step")
    add("--num-layers", type=int, default=3, help="draft layers")
    add("--target-layer-ids", type=int, nargs="+", help="target layers whose outputs the draft reads, "
        "counted from 0 (speculators' ids minus 1) [1, L//2 - 1, L - 4]")
    add("--draft-vocab-size", type=int, default=32000, help="most frequent ids only; 0: all")
    add("--mask-token-id", type=int, help="an id that text never uses [first spare embedding row]")
    add("--sample-from-anchor", action=argparse.BooleanOptionalAction, default=True,
        help="the anchor's slot predicts too (DSpark); without: DFlash's layout")
    add("--markov-rank", type=int, default=256, help="rank of the Markov head; 0: pure DFlash")
    add("--markov-head-type", default="vanilla", help="vanilla, gated or rnn")
    add("--markov-std", type=float, default=0.01, help="spread of the fresh W1")
    add("--enable-confidence-head", action=argparse.BooleanOptionalAction, default=True,
        help="predict each draft's acceptance")
    add("--confidence-head-with-markov", action=argparse.BooleanOptionalAction, default=True,
        help="the confidence head also sees the previous token's Markov embedding")
    add("--init-from-target", action=argparse.BooleanOptionalAction, default=False,
        help="start from the target's last layers and final norm")
    add("--from-pretrained", help="start from this draft (its shape wins over the flags above)")
    add = p.add_argument_group("the objective and the optimiser").add_argument
    add("--loss-fn", type=json.loads, default={"ce": 0.1, "tv": 0.9},
        help='weights of ce, tv and kl_div as JSON [{"ce": 0.1, "tv": 0.9}]')
    add("--confidence-head-alpha", type=float, default=1.0, help="weight of the confidence loss")
    add("--dflash-decay-gamma", type=float, default=4.0, help="slot i weighs exp(-i / this)")
    add("--chunk-blocks", type=int, default=16, help="blocks whose logits exist at a time; 0: all")
    add("--epochs", type=int, default=5, help="passes over the data")
    add("--max-steps", type=int, default=0, help="stop after this many steps; 0: by --epochs")
    add("--lr", type=float, default=3e-4, help="peak learning rate")
    add("--warmup-ratio", type=float, default=0.04, help="share of the steps that warm up")
    add("--total-seq-len", type=int, default=4096, help="tokens of a row; documents are packed")
    add("--batch-size", type=int, default=1, help="rows per step")
    add("--seed", type=int, default=0, help="seed of every random draw")
    add("--dtype", choices=["auto", "float32", "bfloat16"], default="auto",
        help="of the target and of autocast [bfloat16 on CUDA, else float32]")
    add("--feature-cache-gb", type=float, default=4.0, help="memory for target states kept between "
        "epochs")
    add = p.add_argument_group("results").add_argument
    add("--save-path", default="output", help="folder for the draft, logs and checkpoints")
    add("--compare", action="store_true", help="train DFlash, vanilla, gated and rnn, equal budget")
    add("--checkpoint-every", type=int, default=0, help="steps between checkpoints; 0: none")
    add("--resume", action="store_true", help="go on from SAVE_PATH/checkpoints/last")
    add("--log-every", type=int, default=10, help="steps between lines of metrics.jsonl")
    add("--eval-every", type=int, default=0, help="steps between decodings of held-out prompts")
    add("--eval-samples", type=int, default=32, help="held-out prompts")
    add("--eval-max-new-tokens", type=int, default=128, help="budget of a held-out answer")
    add("--eval-concurrency", type=int, default=1, help="held-out requests at a time")
    return p

def fail(message):
    print(f"train.py: {message}", file=sys.stderr)
    return 2

def load_target(args):
    """The frozen target and its tokenizer, on the best device there is."""
    name = args.verifier_name_or_path or "Qwen/Qwen3-0.6B"
    device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if args.dtype == "auto":
        args.dtype = "bfloat16" if device == "cuda" else "float32"
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        target = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, args.dtype))
    except OSError as error:
        raise ValueError(NO_HUB.format(name)) from error
    return target.to(device).eval().requires_grad_(False), tokenizer

def mask_token(args, target, tokenizer):
    """An id that no text contains: the flag's, the tokenizer's own mask token, or a spare row."""
    rows = len(target.get_input_embeddings().weight)
    choice = args.mask_token_id
    if choice is None:
        choice = tokenizer.mask_token_id if tokenizer.mask_token_id is not None else len(tokenizer)
    names = ", ".join(f"{i} {t}" for t, i in sorted(tokenizer.get_added_vocab().items(), key=lambda x: x[1]))
    require(0 <= choice < rows, f"mask token {choice} is not one of the {rows} embedding rows; give "
            f"--mask-token-id, a special token that your text never uses: {names[:300]}")
    return choice

def fresh_draft(args, target, tokenizer, draft_ids):
    """A draft by the flags, or the one of --from-pretrained."""
    if args.from_pretrained:
        return DSparkDraft.from_pretrained(args.from_pretrained, target)
    shape = dict(num_hidden_layers=args.num_layers, mask_token_id=mask_token(args, target, tokenizer))
    names = ("block_size", "sample_from_anchor", "markov_rank", "markov_head_type",
             "enable_confidence_head", "confidence_head_with_markov")
    shape.update({name: getattr(args, name) for name in names})
    if args.target_layer_ids:
        shape["target_layer_ids"] = args.target_layer_ids
    torch.manual_seed(args.seed)
    draft = DSparkDraft.from_target(target, draft_ids, args.markov_std, **shape)
    draft.float()
    if args.init_from_target:
        init_from_target(draft, target)
    return draft

VARIANTS = {  # --compare: the same budget for each
    "dflash": dict(markov_rank=0, sample_from_anchor=False, enable_confidence_head=False),
    "vanilla": dict(markov_head_type="vanilla"), "gated": dict(markov_head_type="gated"),
    "rnn": dict(markov_head_type="rnn")}

def train_one(args, target, tokenizer, documents, prompts, draft_ids, folder):
    """Train, save and decode one draft -> its results at temperature 0 and 1"""
    draft, stops = fresh_draft(args, target, tokenizer, draft_ids), stop_ids(target, tokenizer)
    trainer = Trainer(draft, target, documents, args, folder)
    if args.resume:
        trainer.resume(target)
    ids = draft.config.target_layer_ids
    print(f"draft: {sum(p.numel() for p in draft.parameters()):,} parameters, gamma "
          f"{draft.config.gamma}, reads layers {ids} (speculators: {[k + 1 for k in ids]})")
    few = prompts[:8]
    trainer.run(lambda draft: total(generate(target, draft, few, args.eval_max_new_tokens,
                                             stop_token_ids=stops)).accepted_length)
    draft.config.dspark_extra = {"enable_thinking": args.enable_thinking, "steps": trainer.step}
    draft.save_pretrained(folder)
    ways = ("sample", "argmax") if not draft.config.markov_rank else ("sample",)
    results = {}
    for temperature in (0.0, 1.0):
        tries = [decode(target, draft, prompts, args, temperature, stops, way)
                 for way in (ways if temperature else ways[:1])]
        best = max(tries, key=lambda result: result["accepted_length"])
        best["draft_sampling"] = ways[tries.index(best)]
        show(folder.name, temperature, best)
        results[f"{temperature:g}"] = best
    return results

def split(args, rows):
    """Rows in a seeded order -> rows to train on, held-out rows; no row is in both."""
    order = torch.randperm(len(rows), generator=seeded(args.seed, "split")).tolist()
    rows = [rows[i] for i in order[: args.max_samples]]
    if args.eval_data:
        return rows, list(read_rows(args.eval_data))[: args.eval_samples]
    held = min(args.eval_samples, len(rows) // 10)
    return rows[held:], rows[:held]

def prepare(args, target, tokenizer):
    """-> training documents, held-out prompts as ids, their domains"""
    rows = dialogues(args.max_samples, seed=1) if args.tiny else read_rows(args.data)
    require(len(rows), f"--data {args.data} is empty")
    rows, held = split(args, rows)
    asked = [(row, conversation(row)[0]) for row in held]
    asked = [(row, turns[: [t["role"] for t in turns].index("user") + 1])
             for row, turns in asked if turns]
    prompts = [render(tokenizer, turns, args.enable_thinking) for _, turns in asked]
    texts = [turns[-1]["content"] for _, turns in asked]
    pathlib.Path(args.save_path, "prompts.json").write_text(json.dumps(texts, indent=1))
    skipped = collections.Counter()
    if args.responses == "target":
        pairs = target_documents(rows, target, tokenizer, args, skipped)
    else:
        pairs = dataset_documents(rows, tokenizer, args, skipped)
    documents = documents_of(pairs, args, skipped)
    reasons = ", ".join(f"{count} x {reason}" for reason, count in skipped.items())
    print(f"documents: kept {len(documents)}, skipped {sum(skipped.values())} {reasons}")
    require(documents, "nothing to train on: no document has two supervised tokens")
    require(prompts, "no held-out prompt: more data, or --eval-data FILE")
    return documents, prompts, [row.get("domain", "all") for row, _ in asked]

def coverage(documents, args):
    """How many supervised slots a step uses of those there are."""
    rows = pack_rows(documents, args.total_seq_len)
    free = [sum(len(x["ids"]) - x["start"] - 1 for x in row) for row in rows]
    used = sum(min(args.max_anchors, n) for n in free)
    print(f"{sum(len(x['ids']) for x in documents)} tokens in {len(rows)} rows; an epoch uses {used} of "
          f"{sum(free)} possible anchors ({used / max(1, sum(free)):.0%}), x {args.block_size} slots")

def tiny_facts(target, documents, prompts, args, stops):
    """What the synthetic numbers must be read against."""
    states = TargetStates(target, [], 0)
    entropy = entropy_per_token(target, states, documents[:64])
    bigram = BigramDraft(documents, target, args.block_size)
    result = decode(target, bigram, prompts, args, 1.0, stops)
    print(f"SYNTHETIC data: the target's entropy is {entropy:.2f} nats per token; a plain bigram drafter "
          f"reaches accepted length {result['accepted_length']:.2f} at temperature 1")
    return {"entropy_per_token": entropy, "bigram_accepted_length": result["accepted_length"]}

def run(args):
    started, out = time.time(), pathlib.Path(args.save_path)
    for name in ("max_samples", "batch_size", "max_anchors", "num_layers", "total_seq_len"):
        require(getattr(args, name) > 0, f"--{name.replace('_', '-')} must be positive")
    out.mkdir(parents=True, exist_ok=True)
    if args.tiny and not args.verifier_name_or_path:
        args.verifier_name_or_path = str(make_target(args, out / "target"))
    target, tokenizer = load_target(args)
    fresh_draft(args, target, tokenizer, None)  # a wrong flag ends the run here, not after the answers
    documents, prompts, domains = prepare(args, target, tokenizer)
    coverage(documents, args)
    stops = stop_ids(target, tokenizer)
    rows = len(target.get_input_embeddings().weight)
    draft_ids = draft_vocabulary(documents, args.draft_vocab_size, stops, rows)
    facts = tiny_facts(target, documents, prompts, args, stops) if args.tiny else {}
    results = {}
    for name, change in (VARIANTS if args.compare else {"": {}}).items():
        one = argparse.Namespace(**{**vars(args), **change})
        results[name] = train_one(one, target, tokenizer, documents, prompts, draft_ids, out / name)
    if args.compare:
        print_table(results)
        for name in ("config.json", "model.safetensors"):
            shutil.copy(out / "vanilla" / name, out / name)
    main_result = results["vanilla" if args.compare else ""]
    record = dict(
        accepted_length={t: x["accepted_length"] for t, x in main_result.items()}, **facts,
        temperatures=main_result, compare=results if args.compare else None,
        seconds=time.time() - started, arguments=vars(args),
        versions={"torch": torch.__version__, "transformers": transformers.__version__})
    (out / "results.json").write_text(json.dumps(record, indent=1))
    print(f"saved {out} after {time.time() - started:.0f} s; now: python serve_demo.py --draft {out}")

def print_table(results):
    print(f"{'':10} {'accepted length':>16}   acceptance of each draft, given those before it (T=1)")
    print(f"{'draft':10} {'T=0':>8}{'T=1':>8}")
    for name, result in results.items():
        shares = " ".join(f"{x:.2f}" for x in result["1"]["conditional_acceptance"])
        print(f"{name:10} {result['0']['accepted_length']:8.2f}{result['1']['accepted_length']:8.2f}   "
              f"{shares}")

def main():
    p = parser()
    if "--tiny" in sys.argv:
        p.set_defaults(**TINY)
    args = p.parse_args()
    args.chunk_blocks = args.chunk_blocks or None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        run(args)
    except ValueError as error:
        sys.exit(fail(error))

if __name__ == "__main__":
    main()
