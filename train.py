"""Train a DSpark draft: conversations in, checkpoint out (arXiv 2607.05147, sec. 3.3).

    conversations -> the target's chat template -> the target's OWN answers (its words are what the
    draft must guess) -> hidden states of the frozen target, computed online -> random anchors ->
    the loss of eq. 9-12 -> held-out prompts, decoded for real -> checkpoint

    python train.py --tiny      no download: synthetic dialogues, done in about three minutes
    python train.py             Qwen3-0.6B on ShareGPT
    torchrun --nproc_per_node 4 train.py --batch-size 4    the same steps, on four devices
Shapes are named as in dspark.py.
"""
import argparse
import collections
import contextlib
import hashlib
import io
import itertools
import json
import math
import os
import pathlib
import random
import re
import sys
import time

import huggingface_hub
import tokenizers
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

import dspark
from dspark import (DSparkDraft, calibration_report, fit_sts, generate, ratio, require, stopwatch,
                    total)

# ------------------------------------------------------------------- the objective (sec. 3.3)

def sample_anchors(loss_mask, document_ids, count, generators):
    """Random anchors, sorted. An anchor and the token after it are both supervised: when decoding,
    the last prompt token is never an anchor and no draft starts a new document.

    loss_mask, document_ids [B, S]; a generator per row -> anchors, valid [B, N], N <= count
    """
    same = (document_ids[:, :-1] == document_ids[:, 1:]) & (document_ids[:, 1:] >= 0)
    usable = (loss_mask[:, :-1].bool() & loss_mask[:, 1:].bool() & same).cpu()
    chosen = []
    for row, generator in zip(usable, generators):
        places = row.nonzero()[:, 0]
        order = torch.randperm(len(places), generator=generator)
        chosen.append(places[order[:count]].sort().values)
    anchors = pad_sequence(chosen, batch_first=True, padding_value=-1).to(loss_mask.device)
    return anchors.clamp(min=0), anchors >= 0

def slot_labels(config, input_ids, loss_mask, anchors, anchor_valid, document_ids=None):
    """Which token each slot predicts, and whether it is supervised: that token must be an assistant
    token of the anchor's document, and so must those of all predicting slots before it.

    Assistant span 8..39, block 4, anchor 37, sampling from the anchor: the slots predict 38, 39,
    40, 41 -> supervised [1, 1, 0, 0].   -> index [B, N, K], supervised bool [B, N, K]
    """
    slot, last = torch.arange(config.block_size, device=anchors.device), input_ids.shape[1] - 1
    index = anchors[..., None] + slot + 1 - config.first_slot  # [B, N, K]
    row = torch.arange(len(anchors), device=anchors.device)[:, None, None]
    inside, index = index <= last, index.clamp(max=last)
    fine = loss_mask[row, index].bool() & inside & anchor_valid[..., None]
    if document_ids is not None:
        fine &= document_ids[row, index] == document_ids[row, anchors[..., None]]
    predicts = slot >= config.first_slot
    return index, (fine | ~predicts).long().cumprod(-1).bool() & predicts

LOSSES = "ce", "tv", "kl_div"

def slot_terms(logits, target_logits, labels, draft_ids, names=LOSSES, norm=None):
    """The loss terms slot by slot, in float32: bf16 softmaxes cost up to 31 % gradient error.

    logits [M, K, D], target_logits [M, K, V] (or [M, K, D] with norm [M, K], their logsumexp over
    V), labels [M, K] target ids -> {name: [M, K]}: ce (eq. 9; 0 where the true token has no draft
    id), tv = 1 - sum min(p_d, p_t) over D, half the L1 distance that eq. 10 weighs, kl_div, and
    accept = c* = sum min(p_d, p_t) with p_t over V (eq. 8)
    """
    log_d, scores = logits.float().log_softmax(-1), target_logits.detach().float()
    p_t = scores.softmax(-1) if norm is None else (scores - norm[..., None]).exp()
    p_d, terms = log_d.exp(), {}
    if norm is not None or len(draft_ids) < p_t.shape[-1]:
        p_t = p_t if norm is not None else p_t[..., draft_ids]  # [M, K, D]
        terms["accept"] = 1 - (p_d.detach() - p_t).relu_().sum(-1)
        p_t /= p_t.sum(-1, keepdim=True).clamp(min=1e-30)  # renormalised over the draft vocabulary
    distance = (p_d - p_t).relu_().sum(-1)  # 1 - sum min(p_d, p_t), as p_d sums to 1
    terms.setdefault("accept", 1 - distance.detach())
    if "ce" in names:
        column = torch.searchsorted(draft_ids, labels).clamp(max=len(draft_ids) - 1)
        has_id = draft_ids[column] == labels
        terms["ce"] = -log_d.gather(-1, column[..., None])[..., 0] * has_id
    if "tv" in names:
        terms["tv"] = distance
    if "kl_div" in names:
        terms["kl_div"] = F.kl_div(log_d, p_t, reduction="none").sum(-1)
    return terms

@torch.no_grad()
def teacher_head(draft, states, where):
    """-> the target's head cut down to the draft vocabulary [D, d]; the normaliser over V of its
    logits at `where` [M, K], once for each position that blocks share; None where D = V."""
    head, ids = draft.target_head, draft.draft_ids
    if len(ids) == len(head):
        return head, None
    places, inverse = where.clamp(min=0).unique(return_inverse=True)
    parts = states[places].to(head.dtype).split(64)
    norm = torch.cat([F.linear(x, head).float().logsumexp(-1) for x in parts])
    return head[ids] if "lm_head" in draft.own else draft.lm_head, norm[inverse]

def block_loss(draft, hidden, embedding, head, blocks, weights, norms):
    """M blocks' part of the loss (eq. 12), and sums. hidden [M, K, d], embedding [M, K, r] of the
    previous tokens; weights and norms: of the terms, weight [M, K]: of the slots."""
    labels, teacher, norm, weight, supervised = blocks
    logits, confidence = draft.heads(hidden, None, embedding)
    with torch.autocast(hidden.device.type, enabled=False):
        flat = teacher.flatten(0, 1).to(head.dtype)
        target_logits = F.linear(flat, head).unflatten(0, labels.shape)  # [M, K, D]
        terms = slot_terms(logits, target_logits, labels, draft.draft_ids, weights, norm)
        rate = terms.pop("accept") * supervised  # c*, eq. 8
        if confidence is not None:
            terms["confidence"] = F.binary_cross_entropy_with_logits(  # eq. 11
                confidence.float(), rate.clamp(0, 1), reduction="none")
        sums = {name: (weight * term).sum() / norms.get(name, norms["all"])
                for name, term in terms.items()}
    loss = sum(weights[name] * value for name, value in sums.items())
    sums.update(rate=rate.sum(0), tau=rate[:, draft.config.first_slot :].cumprod(1).sum())
    return loss, {name: value.detach() for name, value in sums.items()}

class DeliverGradients(torch.autograd.Function):
    """Gradients that were computed chunk by chunk, handed on when loss.backward() asks for them."""
    @staticmethod
    def forward(ctx, loss, gradients, *inputs):
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx, scale):
        gradients, ctx.gradients = ctx.gradients, None  # large: scaled in place, used once
        return None, None, *(x.mul_(scale) for x in gradients)

def chunked_loss(draft, hidden, embedding, head, blocks, weights, norms, chunk):
    """Forward and backward one chunk of blocks at a time, on detached states; a single backward
    then runs through W1 and the backbone. Nothing is recomputed, one chunk of [K, V] tensors
    exists, and W1, as tall as V, gets one gradient, not one per chunk."""
    params = [p for name, p in draft.named_parameters() if "_head." in name and "w1" not in name]
    loss, totals, slot_grads = 0.0, collections.Counter(), []
    grads = [torch.zeros_like(p) for p in params]
    for start in range(0, len(hidden), chunk):
        part = slice(start, start + chunk)
        leaves = [x[part].detach().requires_grad_() for x in (hidden, embedding)]
        some = [x if x is None else x[part] for x in blocks]
        share, sums = block_loss(draft, *leaves, head, some, weights, norms)
        new = torch.autograd.grad(
            share, [*leaves, *params], allow_unused=True, materialize_grads=True)
        slot_grads.append(new[:2])
        for grad, addend in zip(grads, new[2:]):
            grad += addend
        loss = loss + share.detach()
        totals.update(sums)
    grads = [*map(torch.cat, zip(*slot_grads)), *grads]
    return DeliverGradients.apply(loss, grads, hidden, embedding, *params), totals

def dspark_loss(draft, features, target_hidden, input_ids, loss_mask, anchors, anchor_valid,
                document_ids=None, position_ids=None, loss_fn=None, decay=4.0, confidence_alpha=1.0,
                chunk_blocks=None):
    """0.1 CE + 0.9 TV + alpha BCE(c, c*), weighted means over supervised slots (eq. 9-12).

    features [B, S, n d]; target_hidden [B, S, d], the target's last states AFTER its final norm;
    input_ids, loss_mask [B, S]; anchors, anchor_valid [B, N] -> loss, metrics {its terms of ce, tv,
    kl_div; confidence, accept@k, tau, ...}. The i-th predicting slot, from 0, weighs
    exp(-i / decay).
    chunk_blocks: how many blocks' [K, V] tensors exist at a time; the result is the same.
    """
    weights, config = dict(loss_fn or {"ce": 0.1, "tv": 0.9}), draft.config
    require({*weights} <= {*LOSSES}, f"loss_fn knows {LOSSES}, got {weights}")
    weights["confidence"] = confidence_alpha
    hidden = draft.backbone(features, input_ids, anchors, document_ids, position_ids)
    index, supervised = slot_labels(
        config, input_ids, loss_mask, anchors, anchor_valid, document_ids)
    keep = supervised.any(-1)  # [B, N]: dummies and empty blocks never reach the heads
    row = torch.arange(len(input_ids), device=index.device)[:, None, None]
    where = (row * input_ids.shape[1] + index - 1)[keep]  # [M, K], in the flattened rows
    labels, teacher = input_ids[row, index][keep], target_hidden[row, index - 1][keep]  # [M, K, ..]
    prev = draft.previous_tokens(input_ids, anchors)[keep]
    supervised, hidden = supervised[keep], hidden[keep]
    slot = torch.arange(config.block_size, device=index.device) - config.first_slot
    weight = supervised * torch.exp(-slot.clamp(min=0) / decay)
    has_id = torch.isin(labels, draft.draft_ids)  # where not, the slot leaves the CE alone
    norms = {"all": weight.sum().clamp(min=1e-8), "ce": (weight * has_id).sum().clamp(min=1e-8)}
    embedding = draft.markov_head.markov_w1(prev) if draft.markov_head else hidden[..., :0]
    head, norm = teacher_head(draft, target_hidden.flatten(0, 1), where)
    blocks = labels, teacher, norm, weight, supervised
    job = draft, hidden, embedding, head, blocks, weights, norms
    if chunk_blocks and torch.is_grad_enabled() and len(hidden):
        loss, sums = chunked_loss(*job, chunk_blocks)
    else:
        loss, sums = block_loss(*job)
    counts = supervised.sum(0)
    rates, tau = sums.pop("rate") / counts.clamp(min=1), sums.pop("tau")
    metrics = {f"accept@{k + 1}": rate for k, rate in enumerate(rates[config.first_slot :])}
    return loss, dict(metrics, **sums, tau=1 + tau / max(1, len(hidden)), weight=norms["all"],
                      slots=counts.sum(), without_draft_id=(supervised & ~has_id).sum())

# ------------------------------------------------------------------ conversations and answers

ROLES = {"human": "user", "user": "user", "system": "system", "tool": "tool", "observation": "tool",
         "function": "tool", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
         "bing": "assistant", "bard": "assistant", "model": "assistant"}
NO_HUB = ("{} cannot be had from the model hub. Without one, try `python train.py --tiny` (no "
          "download) or give local files: --verifier-name-or-path FOLDER --data FILE.json")
CACHED_TOKENS = 65536  # of all answers that are written at the same time
UNIT = 128  # conversations answered, and kept on disk, together

@contextlib.contextmanager
def counted(skipped):
    """A ValueError costs one row or answer, not the run; it is counted under its message."""
    try:
        yield
    except json.JSONDecodeError:
        skipped["malformed JSON"] += 1
    except ValueError as error:
        skipped[str(error)] += 1

def read_rows(source, skipped):
    """Rows of a JSON or JSON Lines file, of a folder of them, or of a hub data set."""
    path, rows = pathlib.Path(source), []
    if not path.exists():
        require(path.suffix not in (".json", ".jsonl"), f"--data {source}: no such file")
        import datasets  # slow to import; only hub data sets need it
        name = "Aeala/ShareGPT_Vicuna_unfiltered" if source == "sharegpt" else source
        try:
            if not huggingface_hub.constants.HF_HUB_OFFLINE:
                huggingface_hub.HfApi().dataset_info(name, timeout=5)  # no hub: fails at once
            return list(datasets.load_dataset(name)["train"])
        except Exception as error:  # the errors of the hub and of datasets share no other base
            raise ValueError(NO_HUB.format(f"data set {name}")) from error
    for file in sorted(path.rglob("*.json*")) if path.is_dir() else [path]:
        text = file.read_text(encoding="utf-8-sig").strip()
        for part in [text] if text.startswith("[") else filter(str.strip, text.split("\n")):
            with counted(skipped):
                found = json.loads(part)
                rows += found if isinstance(found, list) else [found]
    return rows

def conversation(row):
    """A row in ShareGPT's, OpenAI's or prompt spelling -> [{role, content}] with an answer at its
    end, "" where only the question is known; ValueError: why not"""
    require(isinstance(row, dict), "row is not an object")
    turns = row.get("conversations") or row.get("messages")
    asked = row.get("turns") or row.get("prompt")
    if asked and not turns:
        asked = asked if isinstance(asked, list) else [asked]
        turns = [turn for text in asked for turn in (
            {"role": "user", "content": text}, {"role": "assistant", "content": ""})]
    require(isinstance(turns, list) and turns, "no conversation")
    if row.get("system"):
        turns = [{"role": "system", "content": row["system"]}, *turns]
    found, questions = [], 0
    for turn in turns:
        require(isinstance(turn, dict), "entry is not a turn")
        role, text = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
        require(isinstance(text, str) and text.encode(errors="ignore").decode() == text,
                "text is missing or no valid string")
        require(isinstance(role, str) and role in ROLES, f"unknown role {role!r:.30}")
        questions += ROLES[role] == "user"
        if questions or ROLES[role] != "assistant":  # an answer without its question is dropped
            found.append({"role": ROLES[role], "content": text})
    require(questions, "no question")
    return found + [{"role": "assistant", "content": ""}] * (found[-1]["role"] != "assistant")

def conversations(rows, skipped):
    talks = []
    for row in rows:
        with counted(skipped):
            talks.append(conversation(row))
    return talks

def render(tokenizer, turns, args):
    """Token ids of the target's chat template, up to where the next answer begins."""
    try:
        ids = tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, return_dict=False,
            enable_thinking=args.enable_thinking)
    except Exception as error:  # a template raises what it likes; the turn is counted, not lost
        raise ValueError("the chat template refuses it") from error
    new = max(args.answer_max_new_tokens, args.eval_max_new_tokens) + args.block_size
    require(len(ids) <= min(args.total_seq_len - 2, tokenizer.model_max_length - new),
            "question fills --total-seq-len, or the target's positions")
    return ids

NOT_SAMPLED = ("min_p typical_p epsilon_cutoff eta_cutoff repetition_penalty no_repeat_ngram_size "
               "bad_words_ids suppress_tokens sequence_bias").split()

def sampling_of(target, args):
    """How the target's answers are drawn: by its generation_config, else at temperature 1."""
    config, known = target.generation_config, dict(temperature=1.0, top_k=0, top_p=1.0)
    if config.do_sample:
        known = {name: getattr(config, name) or value for name, value in known.items()}
    left_out = {name: getattr(config, name, None) for name in NOT_SAMPLED}
    left_out = {name: value for name, value in left_out.items() if value and value != 1}
    if left_out:
        dspark.say_once(f"note: the answers are drawn without the target's {left_out}")
    asked = args.answer_temperature
    return known if asked is None else dict(known, temperature=asked)

def answer_all(talks, target, tokenizer, args, key=""):
    """ONE document per answer, rendered as serving would render it: question, answer, end of turn.
    With --responses target the target answers itself, in the light of its own earlier answers.
    -> [(token ids, where the answer starts)], Counter of what was skipped"""
    documents, skipped = [], collections.Counter()
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for place in range(max(map(len, talks), default=0)):
        asked = []
        for talk in talks:
            if place < len(talk) and talk[place]["role"] == "assistant":
                with counted(skipped):
                    asked.append((talk[place], render(tokenizer, talk[:place], args)))
        if args.responses == "target":
            longest = max((len(ids) for _, ids in asked), default=0)
            answers = [one.tokens for one in generate(
                target, None, [ids for _, ids in asked], args.answer_max_new_tokens,
                **sampling_of(target, args), generator=seeded(args.seed, key, len(documents)),
                max_concurrency=CACHED_TOKENS // (longest + args.answer_max_new_tokens) + 1,
                stop_token_ids=target.generation_config.eos_token_id)]
            for (turn, _), answer in zip(asked, answers):
                turn["content"] = tokenizer.decode(answer, skip_special_tokens=True)
        else:
            answers = [tokenizer(turn["content"], add_special_tokens=False).input_ids + end
                       for turn, _ in asked]
        for (turn, prompt), answer in zip(asked, answers):
            ids = [*prompt, *answer][: min(args.total_seq_len, tokenizer.model_max_length)]
            with counted(skipped):  # an anchor and the token after it
                require(turn["content"].strip() and len(ids) >= len(prompt) + 2,
                        "answer has fewer than two tokens")
                documents.append((ids, len(prompt)))
    return documents, skipped

def documents_of(talks, target, tokenizer, args, skipped):
    """The training documents [{ids, start, number}]. Units of conversations are kept on disk under
    a hash of all that decides them: a run that was killed goes on where it stopped."""
    path, known = pathlib.Path(args.save_path, "answers.jsonl"), {}
    for line in path.read_text().split("\n") if path.exists() else ():
        known.update(json.loads(line) if line.endswith("}]}") else {})  # not cut off by a kill
    weights = [x.flatten()[:4].tolist() for x in target.parameters()]  # not the path: it may move
    salt = (weights, len(tokenizer), tokenizer.chat_template, sampling_of(target, args),
            args.responses, args.answer_max_new_tokens, args.enable_thinking, args.total_seq_len,
            args.seed)
    units = {digest(salt, i, talks[i : i + UNIT]): talks[i : i + UNIT]
             for i in range(0, len(talks), UNIT)}
    known = gather(known)[0]  # before the first process adds to it
    missing = [key for key in units if key not in known]
    with open(os.devnull if RANK > 0 else path, "a") as file:
        for i in tqdm(range(0, len(missing), RANKS), "answers", unit="unit", disable=RANK > 0):
            mine = {key: answer_all(units[key], target, tokenizer, args, key)
                    for key in missing[i + RANK :][:1]}
            for part in filter(None, gather(mine)):
                known.update(part)  # line end first: a kill may have cut off the line before
                print("\n" + json.dumps(part), end="", file=file, flush=True)
    pairs = []
    for found, lost in map(known.get, units):
        pairs += found
        skipped.update(lost)
    documents = [dict(ids=ids, start=start, number=i) for i, (ids, start) in enumerate(pairs)]
    stops = target.generation_config.eos_token_id
    cuts = sum(document["ids"][-1] not in stops for document in documents)
    print(f"kept {len(documents)} answers of {len(talks)} conversations ({cuts} cut, without an end"
          f" of turn); skipped {skipped.total()} rows and turns: {dict(skipped)}")
    require(documents, "nothing to train on: no document has two supervised tokens")
    return documents

def held_out(talks, args, skipped):
    """-> conversations to train on, to calibrate with, to measure on; shuffled, none in two"""
    order = torch.randperm(len(talks), generator=seeded(args.seed, "split"))[: args.max_samples]
    talks = [talks[i] for i in order]
    few = min(args.eval_samples, max(1, len(talks) // 10))
    if args.eval_data:
        held = conversations(read_rows(args.eval_data, skipped), skipped)[: args.eval_samples]
    else:
        held, talks = talks[:few], talks[few:]
    few = min(args.calibration_samples, len(talks) // 10)
    return talks[few:], talks[:few], held

def questions_of(held, tokenizer, args, skipped):
    """First questions of held-out conversations -> prompts as ids, their texts"""
    prompts, texts = [], []
    for talk in held:
        asked = talk[: [turn["role"] for turn in talk].index("assistant")]
        with counted(skipped):
            prompts.append(render(tokenizer, asked, args))
            texts.append(asked[-1]["content"])
    return prompts, texts

def draft_vocabulary(documents, size, target):
    """The most frequent supervised tokens (ties by smaller id), always the end-of-turn ids, filled
    up with the smallest unused ids -> ascending ids [D], or None for the whole vocabulary."""
    rows, stops = len(target.get_input_embeddings().weight), target.generation_config.eos_token_id
    if not size or size >= rows:
        return None
    counts = collections.Counter(x for doc in documents for x in doc["ids"][doc["start"] :])
    ranked = sorted(counts, key=lambda token: (-counts[token], token))
    chosen = [*dict.fromkeys([*stops, *ranked, *range(rows)])][:size]
    covered = sum(counts[token] for token in chosen) / counts.total()
    print(f"draft vocabulary: {size} of {rows} ids, {covered:.2%} of the supervised tokens")
    return torch.tensor(sorted(chosen))

# --------------------------------------------------------------------------------------- training

RANK = int(os.environ.get("RANK", 0))  # the number of this process under torchrun; alone: 0
RANKS = int(os.environ.get("WORLD_SIZE", 1))

def gather(part):
    """What every process has, in order of rank; alone: [part]. All wait here for each other."""
    parts = [part] * RANKS
    if RANKS > 1:
        dist.all_gather_object(parts, part)
    return parts

def digest(*parts):
    return hashlib.sha256(repr(parts).encode()).hexdigest()

def seeded(*parts):
    """The one rule for random draws: a generator seeded by (seed, epoch, sample id)."""
    return torch.Generator().manual_seed(int(digest(*parts)[:14], 16))

def epoch_steps(documents, epoch, args):
    """The steps of an epoch: --batch-size rows of documents, each at most --total-seq-len long. The
    same whenever the run is started again."""
    rows, size = [], math.inf
    for i in torch.randperm(len(documents), generator=seeded(args.seed, epoch)).tolist():
        size += len(documents[i]["ids"])
        if size > args.total_seq_len:
            rows.append([])
            size = len(documents[i]["ids"])
        rows[-1].append(documents[i])
    return [rows[i : i + args.batch_size] for i in range(0, len(rows), args.batch_size)]

@torch.no_grad()
def target_states(target, layer_ids, row, keep=False):
    """One packed forward of the frozen target over a row of documents -> features [1, S, n d],
    target_hidden [1, S, d] after the final norm. keep: with the documents, for all epochs."""
    counts, d = [len(document["ids"]) for document in row], target.config.hidden_size
    if "states" in row[0]:
        states = torch.cat([document["states"] for document in row])
    else:
        layers = [*layer_ids, target.config.num_hidden_layers - 1]
        ids = torch.tensor(sum((document["ids"] for document in row), []), device=target.device)
        plan = dspark.Plan(0, [0] * len(row), counts, target.device)
        cache = dspark.RaggedCache(len(row), max(counts))
        with dspark.packed(target):
            _, states = dspark.run_target(target, cache, layers, ids, plan, ids[:1] * 0)  # 1 logit
    for document, part in zip(row if keep else (), states.split(counts)):
        document["states"] = part.clone()
    return states[None].split([states.shape[-1] - d, d], -1)

def row_gradients(draft, target, row, epoch, args):
    """Forward and backward of one of a step's rows -> metrics, {} where it has no anchor"""
    tokens = [(token, place >= document["start"], number, place)
              for number, document in enumerate(row) for place, token in enumerate(document["ids"])]
    ids, mask, numbers, places = torch.tensor(tokens, device=target.device).T[:, None]  # [1, S]
    generator = seeded(args.seed, epoch, row[0]["number"])
    anchors, valid = sample_anchors(mask, numbers, args.max_anchors, [generator])
    if not valid.any():
        return {}
    states = target_states(target, draft.config.target_layer_ids, row)
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=args.dtype == "bfloat16"):
        loss, metrics = dspark_loss(
            draft, *states, ids, mask, anchors, valid, numbers, places, args.loss_fn,
            args.dflash_decay_gamma, args.confidence_head_alpha, args.chunk_blocks)
    (loss * metrics["weight"]).backward()  # the step divides by the weight of all its rows
    return {name: float(x) for name, x in dict(metrics, loss=loss.detach()).items()}

def step_gradients(draft, target, rows, epoch, args):
    """The rows of a step are shared out among the processes; gradients and metrics are means over
    the slots of all rows, counts are sums -> metrics, {} without any anchor"""
    found = [row_gradients(draft, target, row, epoch, args) for row in rows[RANK::RANKS]]
    found = [metrics for part in gather(found) for metrics in part if metrics]
    weights = [metrics.pop("weight") for metrics in found]
    for weight in draft.parameters() if found else ():
        weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        if RANKS > 1:
            dist.all_reduce(weight.grad)
        weight.grad /= sum(weights)
    means = {name: sum(share * x[name] for share, x in zip(weights, found)) / sum(weights)
             for name in (found or [{}])[0]}
    counts = {name: sum(x[name] for x in found) for name in ("slots", "without_draft_id")}
    return {**means, **counts} if found else {}

def update(draft, optimizer, done, steps, args):
    """Step number `done`, counted from 0: clipped, at the warm-up's or the cosine's rate."""
    torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
    warm = max(1, round(args.warmup_ratio * steps))
    cosine = 0.5 + 0.5 * math.cos(math.pi * max(0, done - warm) / max(1, steps - warm))
    optimizer.param_groups[0]["lr"] = args.lr * min(cosine, (done + 1) / warm)
    optimizer.step()

def train(draft, target, documents, prompts, args):
    """Train to the last step; log every step, now and then save and decode held-out prompts."""
    folder, ids = pathlib.Path(args.save_path), draft.config.target_layer_ids
    last = folder / "checkpoints/last"
    last.parent.mkdir(parents=True, exist_ok=True)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=args.lr, weight_decay=0.0, fused=True)
    first_epoch = epoch_steps(documents, 0, args)
    steps = args.max_steps or args.epochs * len(first_epoch)
    for row in sum(first_epoch, []) if args.keep_states else ():
        target_states(target, ids, row, keep=True)  # in these rows after --resume, too: bit for bit
    texts = digest([document["ids"] for document in documents])
    run = dict(vars(args), documents=texts, **dict.fromkeys(MAY_CHANGE))
    first, best = resume(last, draft, optimizer, run) if args.resume else (0, 0.0)
    print(f"{folder}: {sum(p.numel() for p in draft.parameters()):,} parameters, step {first} of "
          f"{steps}, gamma {draft.config.gamma}, reads layers {ids} (speculators: "
          f"{[k + 1 for k in ids]})")
    draft.config.dspark_extra = {"enable_thinking": args.enable_thinking, "steps": steps}
    started, tokens, skipped = time.time(), 0, 0
    work = ((epoch, rows) for epoch in itertools.count()
            for rows in epoch_steps(documents, epoch, args))
    bar = tqdm(itertools.islice(work, first, steps), "training", steps, initial=first, unit="step",
               disable=RANK > 0)
    path = folder / "metrics.jsonl"
    with path.open("a+") if RANK == 0 else io.StringIO() as log:  # one writes
        log.seek(0)
        log.truncate(sum(len(log.readline()) for _ in range(first)))  # later steps: taken again
        for step, (epoch, rows) in enumerate(bar, first + 1):
            optimizer.zero_grad()
            metrics = step_gradients(draft, target, rows, epoch, args)
            bad = [name for name, value in metrics.items() if not math.isfinite(value)]
            require(not bad, f"step {step}: {', '.join(bad)} not finite; try a lower --lr")
            tokens += sum(len(document["ids"]) for row in rows for document in row)
            skipped += not metrics
            seconds = time.time() - started
            line = dict(step=step, epoch=epoch, seconds=round(seconds, 2),
                        tokens_per_second=round(tokens / seconds), **metrics)
            print(json.dumps(line), file=log, flush=True)  # line n is step n
            if metrics:
                update(draft, optimizer, step - 1, steps, args)
                bar.set_postfix(loss=f"{metrics['loss']:.3f}", tau=f"{metrics['tau']:.2f}")
            if args.checkpoint_every and step % args.checkpoint_every == 0 and RANK == 0:
                length = total(decode(target, draft, prompts[:8], args, 0)[0]).accepted_length
                tqdm.write(f"step {step}: accepted length {length:.2f} on held-out prompts")
                if length > best:
                    best = length
                    draft.save_pretrained(last.with_name("best"))
                save(last, draft, optimizer, step=step, best=best, run=run)
    if skipped:
        print(f"{skipped} steps had no anchor and changed nothing")
    if RANK == 0:
        draft.save_pretrained(folder)

# Between a run and its continuation; the hash of the documents tells other targets apart.
MAY_CHANGE = "resume save_path checkpoint_every verifier_name_or_path".split()

def save(path, draft, optimizer, **progress):
    """Complete under another name, then renamed: a kill while saving costs nothing."""
    state = dict(progress, draft=draft.state_dict(), optimizer=optimizer.state_dict())
    torch.save(state, path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)

def resume(path, draft, optimizer, run):
    """Go on from a checkpoint -> steps done, 0 for a run that was killed before its first one; the
    best accepted length so far"""
    if not path.exists():
        print(f"--resume: no checkpoint in {path} yet, starting from the beginning")
        return 0, 0.0
    saved = torch.load(path, map_location="cpu", weights_only=True)  # tensors and plain values
    other = [f"{name} was {saved['run'].get(name)}, is {value}" for name, value in run.items()
             if saved["run"].get(name) != value]
    require(not other, f"--resume: {path} belongs to another run: {'; '.join(other)}")
    draft.load_state_dict(saved["draft"])
    optimizer.load_state_dict(saved["optimizer"])
    return saved["step"], saved["best"]

def warm_start(target, args, heads):
    """A DFlash checkpoint has no heads: it gains those that the flags ask for, its body stays."""
    draft = DSparkDraft.from_pretrained(args.from_pretrained, target)
    bare = draft.markov_head is None and draft.confidence_head is None
    fits = all(getattr(draft.config, name) == value for name, value in heads.items())
    require(bare or fits or not args.compare,
            f"--compare: {args.from_pretrained} has heads of its own, other than {heads}")
    if bare:
        shape = {**vars(draft.config), **heads}
        fresh = DSparkDraft.from_target(target, draft.draft_ids, args.markov_std, **shape)
        for name in ("config", "shapes", "markov_head", "confidence_head"):
            setattr(draft, name, getattr(fresh, name))
    return draft

def fresh_draft(args, target, tokenizer, draft_ids=None):
    """A draft by the flags, or the one of --from-pretrained; float32 weights."""
    torch.manual_seed(args.seed)
    heads = {name: getattr(args, name) for name in (
        "markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")}
    if args.from_pretrained:
        return warm_start(target, args, heads)
    rows = len(target.get_input_embeddings().weight)
    known = (args.mask_token_id, tokenizer.mask_token_id, len(tokenizer))
    mask = next(token for token in known if token is not None)
    require(0 <= mask < rows, f"mask token {mask} is none of the {rows} embedding rows: give "
            "--mask-token-id, a special token that your text never uses, of "
            f"{dict(sorted((i, t) for t, i in tokenizer.get_added_vocab().items()))}")
    layers = {"target_layer_ids": args.target_layer_ids} if args.target_layer_ids else {}
    draft = DSparkDraft.from_target(
        target, draft_ids, args.markov_std, mask_token_id=mask, num_hidden_layers=args.num_layers,
        block_size=args.block_size, sample_from_anchor=args.sample_from_anchor, **heads, **layers)
    if args.init_from_target:
        init_from_target(draft, target)
    return draft

def init_from_target(draft, target):
    """Start from what the target knows: its last layers, its final norm, its last tapped state."""
    sources = target.base_model.layers[-len(draft.layers) :]
    for layer, source in zip(draft.layers, sources):
        layer.load_state_dict(source.state_dict(), strict=False)  # Llama has no q_norm, no k_norm
    with torch.no_grad():
        draft.fc.weight.zero_()
        draft.fc.weight[:, -len(draft.fc.weight) :].fill_diagonal_(1)
        draft.hidden_norm.weight.copy_(sources[0].input_layernorm.weight)
        draft.norm.weight.copy_(target.base_model.norm.weight)

# ------------------------------------------------ evaluation: held-out prompts, decoded for real

def decode(target, draft, prompts, args, temperature, draft_sampling="sample", together=None):
    """-> Generations, seconds by phase, (confidence logits [N, gamma], accepted [N]) of the rounds
    that neither a stop token nor the budget cut short"""
    kept = []

    def keep(now):
        seconds["rounds"] = seconds.get("rounds", 0) + 1  # of the loop: one target forward each
        rounds = zip(now.requests, now.accepted, now.confidence_logits or ())
        kept.extend(pair for one, *pair in rounds if not one.done)

    with stopwatch(target) as seconds:
        texts = generate(
            target, draft, prompts, args.eval_max_new_tokens, temperature,
            stop_token_ids=target.generation_config.eos_token_id,
            max_concurrency=together or args.eval_concurrency, draft_sampling=draft_sampling,
            generator=seeded(args.seed, float(temperature)), on_round=keep)
    accepted, logits = zip(*kept) if kept else ((), ())
    return texts, seconds, (torch.tensor(logits, dtype=torch.float64), torch.tensor(accepted))

def calibrate(target, draft, prompts, rounds, args, temperature):
    """STS by temperature, since acceptance at 0 is another than at 1. Every second prompt decides
    what is kept of what the others taught. -> ECE and AUC of the survival predictions of `rounds`
    by position, before and after, for JSON"""
    fit, check = (decode(target, draft, part, args, temperature, together=16)[2]
                  for part in (prompts[::2], prompts[1::2]))
    if not all(len(accepted) for _, accepted in (fit, check, rounds)):
        return {}
    ours = fit_sts(*fit, check=check)
    draft.config.dspark_extra.setdefault("sts_temperatures", {})[temperature] = ours.tolist()
    before, after = (calibration_report(*rounds, t) for t in (torch.ones_like(ours), ours))
    print("  calibration error by position", " ".join(f"{x:.3f}" for x in before["ece"]), "-> ",
          " ".join(f"{x:.3f}" for x in after["ece"]))
    return dict(sts_temperatures=ours.tolist(), ece_before=before["ece"], ece_after=after["ece"],
                auc_before=before["auc"], auc_after=after["auc"])

def against_plain(plain, fast, draft_sampling):
    """The same prompts decoded plainly and with a draft, by the same loop -> results, for JSON"""
    (slow_texts, slow, _), (texts, seconds, _), counts = plain, fast, total(fast[0])
    rates = [sum(len(x.tokens) for x in one) / clock["all"] for one, clock, _ in (plain, fast)]
    per_round = 1e3 / seconds.get("rounds", 1)
    return dict(
        accepted_length=counts.accepted_length, rounds=counts.rounds, draft_sampling=draft_sampling,
        acceptance_by_position=counts.acceptance_by_position,
        conditional_acceptance=counts.conditional_acceptance,
        tokens_per_second=dict(zip(("plain", "speculative"), rates)), speedup=rates[1] / rates[0],
        draft_ms=per_round * (seconds["all"] - seconds["target"] - seconds["prefill"]),
        verify_ms=per_round * seconds["target"],
        plain_ms=1e3 * slow["target"] / slow.get("rounds", 1),
        same_text=sum(a.tokens == b.tokens for a, b in zip(slow_texts, texts)),
        by_prompt=[(len(x.tokens), x.rounds, x.accepted) for x in texts])

def evaluate(target, draft, prompts, tuning, plain, args):
    """plain: {temperature: what `decode` gives without a draft} -> {temperature: results}; the
    draft's confidence is calibrated with the prompts in `tuning`"""
    results = {}
    for temperature, slow in plain.items():
        # Without a chain, drafts sampled independently clash: argmax proposals may do better there.
        ways = ["sample"] if draft.config.markov_rank or temperature == 0 else ["sample", "argmax"]
        tries = {way: decode(target, draft, prompts, args, temperature, way) for way in ways}
        way = max(tries, key=lambda way: total(tries[way][0]).accepted_length)
        best = results[temperature] = against_plain(slow, tries[way], way)
        print(f"temperature {temperature}: accepted length {best['accepted_length']:.2f}, "
              f"{best['tokens_per_second']['speculative']:.0f} tokens/s, {best['speedup']:.2f} "
              f"times plain decoding ({len(prompts)} held-out prompts, proposals: {way})")
        if draft.confidence_head is not None:
            best.update(calibrate(target, draft, tuning, tries[way][2], args, temperature))
    return results

# ------------------------------------------------------------ --tiny: a language made on the spot

TINY = dict(
    save_path="output/tiny", block_size=7, num_layers=2, target_layer_ids=[0, 4, 6], lr=1e-2,
    draft_vocab_size=0, markov_rank=64, markov_std=0.1, max_steps=420, max_anchors=96,
    chunk_blocks=0, keep_states=True, total_seq_len=1280, loss_fn={"kl_div": 0.5, "tv": 1.0},
    max_samples=800, eval_samples=16, answer_max_new_tokens=110, eval_max_new_tokens=110)
CHATML = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")

def dialogues(count, seed):
    """Synthetic dialogues: every <name> of the grammar becomes one of its phrases, drawn evenly."""
    path = pathlib.Path(__file__).with_name("testdata") / "grammar.json"
    grammar, rng = json.loads(path.read_text()), random.Random(seed)

    def phrase(name):
        return re.sub("<(.+?)>", phrase, rng.choice(grammar[name[1]]))

    return [{"messages": [{"role": role, "content": re.sub("<(.+?)>", phrase, grammar[role])}
                          for role in ("user", "assistant")]} for _ in range(count)]

def make_tiny_target(args, folder):
    """A BPE tokenizer and a small Qwen3, trained on the dialogues in about a minute."""
    talks = [row["messages"] for row in dialogues(4096, seed=0)]
    texts = [turn["content"] for talk in talks for turn in talk]
    model = tokenizers.ByteLevelBPETokenizer()
    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]
    model.train_from_iterator(texts, 900, show_progress=False, special_tokens=marks)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=model._tokenizer, eos_token=marks[2], pad_token=marks[0],
        mask_token=marks[3], chat_template=CHATML)
    torch.manual_seed(0)
    target = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=320, num_hidden_layers=8,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=1024,
        eos_token_id=tokenizer.eos_token_id, tie_word_embeddings=True))
    written = argparse.Namespace(**{**vars(args), "responses": "dataset"})
    pairs = [torch.tensor(ids) for ids, _ in answer_all(talks, None, tokenizer, written)[0]]
    optimizer = torch.optim.AdamW(target.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=320, pct_start=0.05)
    for step in tqdm(range(320), desc="tiny target", unit="step"):
        batch = random.Random(step).sample(pairs, 12)
        ids = pad_sequence(batch, batch_first=True, padding_value=-100)
        target(input_ids=ids.clamp(min=0), labels=ids, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(target.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    target.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)

@torch.no_grad()
def tiny_facts(target, documents, texts, gamma):
    """What synthetic numbers must be read against: the target's entropy, and the accepted length at
    temperature 0, on `texts`, of drafting the commonest follower of each token."""
    entropies, found = [], []
    pairs = collections.Counter(
        pair for document in documents for pair in itertools.pairwise(document["ids"]))
    guesses = dict(pair for pair, _ in reversed(pairs.most_common()))  # the commonest comes last
    for document in documents[:64]:
        logits = target(torch.tensor([document["ids"]], device=target.device)).logits
        log_p = logits[0, document["start"] - 1 : -1].log_softmax(-1)
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    for text in texts:
        right = [guesses.get(a) == b for a, b in itertools.pairwise(text)]
        while right:
            found.append(1 + [*right[:gamma], False].index(False))
            right = right[found[-1] :]
    entropy, length = float(torch.cat(entropies).mean()), ratio(sum(found), len(found))
    print(f"SYNTHETIC data: entropy {entropy:.2f} nats per token; a plain bigram drafter reaches "
          f"accepted length {length:.2f} at temperature 0")
    return dict(entropy_per_token=entropy, bigram_accepted_length=length)

# ------------------------------------------------------------------------------- the command line

def parser():
    p = argparse.ArgumentParser(description="Train a DSpark draft for a causal language model. "
                                "@FILE stands for the flags in it.", fromfile_prefix_chars="@",
                                formatter_class=argparse.ArgumentDefaultsHelpFormatter,
                                usage=argparse.SUPPRESS)  # so that an error is a single line
    switch = dict(action=argparse.BooleanOptionalAction)
    add = p.add_argument_group("data").add_argument
    add("--tiny", action="store_true", help="no download: synthetic dialogues and target")
    add("--verifier-name-or-path", default="Qwen/Qwen3-0.6B", help="the target: hub id or folder")
    add("--data", default="sharegpt", help="sharegpt, hub data set, JSON (Lines) file or folder")
    add("--eval-data", help="file with held-out prompts; else rows of --data are held out")
    add("--max-samples", type=int, default=5000, help="conversations used at most")
    add("--responses", choices=["target", "dataset"], default="target", help="whose answers to use")
    add("--answer-max-new-tokens", type=int, default=1024, help="budget of an answer by the target")
    add("--answer-temperature", type=float, help="default: the target's generation_config, else 1")
    add("--enable-thinking", **switch, default=False, help="thinking mode of the chat template")
    add = p.add_argument_group("draft").add_argument
    add("--block-size", type=int, default=8, help="slots of a block")
    add("--max-anchors", type=int, default=256, help="blocks per row")
    add("--num-layers", type=int, default=3, help="draft layers")
    add("--target-layer-ids", type=int, nargs="+", help="target layers to read, counted from 0 "
        "(speculators' ids minus 1); default 1, L//2 - 1, L - 4")
    add("--draft-vocab-size", type=int, default=32000, help="the most frequent ids; 0: all")
    add("--mask-token-id", type=int, help="an id that no text uses; default: a spare embedding row")
    add("--sample-from-anchor", **switch, default=True, help="the anchor's slot predicts too")
    add("--markov-rank", type=int, default=256, help="rank of the Markov head; 0: pure DFlash")
    add("--markov-head-type", default="vanilla", help="vanilla, gated or rnn")
    add("--markov-std", type=float, default=0.01, help="spread of the fresh W1")
    add("--enable-confidence-head", **switch, default=True, help="predict each draft's acceptance")
    add("--confidence-head-with-markov", **switch, default=True, help="it also sees W1[prev]")
    add("--init-from-target", **switch, default=False, help="start from the target's last layers")
    add("--from-pretrained", help="start from this draft (speculators, DeepSpec, z-lab); its shape "
        "wins over these flags, but a DFlash draft gains the heads they ask for")
    add = p.add_argument_group("optimisation").add_argument
    add("--loss-fn", type=json.loads, default='{"ce": 0.1, "tv": 0.9}', help="of ce, tv, kl_div")
    add("--confidence-head-alpha", type=float, default=1.0, help="weight of the confidence loss")
    add("--dflash-decay-gamma", type=float, default=4.0, help="slot i weighs exp(-i / this)")
    add("--chunk-blocks", type=int, default=16, help="blocks whose logits exist at a time; 0: all")
    add("--epochs", type=int, default=5, help="passes over the data")
    add("--max-steps", type=int, default=0, help="optimiser steps; 0: by --epochs")
    add("--lr", type=float, default=3e-4, help="peak learning rate")
    add("--warmup-ratio", type=float, default=0.04, help="share of the steps that warm up")
    add("--total-seq-len", type=int, default=4096, help="tokens of a row of packed documents")
    add("--batch-size", type=int, default=1, help="rows per step, one after another")
    add("--keep-states", action="store_true", help="keep the target's states of all documents in "
        "memory, (n + 1) d numbers a token, instead of computing them in every epoch")
    add("--seed", type=int, default=0, help="seed of every random draw")
    add("--dtype", choices=["auto", "float32", "bfloat16"], default="auto", help="bfloat16 on CUDA")
    add = p.add_argument_group("results").add_argument
    add("--save-path", default="output", help="folder for draft, logs and checkpoints")
    add("--compare", nargs="*", choices=HEADS, help="several heads, equal budgets; no names: all")
    add("--checkpoint-every", type=int, default=500, help="steps between checkpoints; 0: none")
    add("--resume", action="store_true", help="go on from SAVE_PATH/checkpoints/last")
    add("--calibration-samples", type=int, default=64, help="held-out prompts for calibration")
    add("--eval-samples", type=int, default=32, help="held-out prompts")
    add("--eval-max-new-tokens", type=int, default=128, help="budget of a held-out answer")
    add("--eval-concurrency", type=int, default=1, help="held-out requests at a time")
    return p

def load_target(args):
    """The frozen target and its tokenizer, on a GPU if there is one. Its generation config then
    lists every id that ends a turn, the tokenizer's too."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # MPS has no float64
    if args.dtype == "auto":
        args.dtype = "bfloat16" if device.type == "cuda" else "float32"
    name = args.verifier_name_or_path
    try:
        local = pathlib.Path(name).is_dir() or huggingface_hub.constants.HF_HUB_OFFLINE
        if not local:  # ask once; transformers would retry for a minute
            huggingface_hub.HfApi().model_info(name, timeout=5)
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        target = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=args.dtype)
    except Exception as error:  # the hub's and the loaders' errors share no other base
        raise ValueError(NO_HUB.format(f"model {name}")) from error
    ends = target.generation_config.eos_token_id
    ends = {*ends} if isinstance(ends, list) else {ends}
    target.generation_config.eos_token_id = sorted((ends | {tokenizer.eos_token_id}) - {None})
    tokenizer.model_max_length = getattr(target.config, "max_position_embeddings", math.inf)
    return target.to(device).eval().requires_grad_(False), tokenizer

HEADS = {"dflash": dict(markov_rank=0, sample_from_anchor=False, enable_confidence_head=False),
         **{name: dict(markov_head_type=name) for name in ("vanilla", "gated", "rnn")}}

def variant(args, name):
    """The flags for one head of --compare; the data and the budget stay equal."""
    wider = name == "dflash" and args.sample_from_anchor  # DFlash's layout: as many drafts
    change = dict(HEADS[name], save_path=f"{args.save_path}/{name}",
                  block_size=args.block_size + wider)
    return argparse.Namespace(**{**vars(args), **change})

def print_table(results):
    print(f"{'accepted length':16}{'T=0':>7}{'T=1':>7}{'x plain':>9}   draft k after k - 1, T=1")
    for name, x in results.items():
        shares = " ".join(f"{share:.2f}" for share in x[1]["conditional_acceptance"])
        print(f"{name:16}{x[0]['accepted_length']:7.2f}{x[1]['accepted_length']:7.2f}"
              f"{x[1]['speedup']:9.2f}   {shares}")

@torch.no_grad()
def forecast(target, draft, talks, args):
    """One line before the long part, to the order of magnitude. Guessed: four letters a token,
    answers of full length, draft tokens as dear as their share of weights, three times for the way
    back. Timed: the target reading 512 tokens, and 32, as if it wrote 32 answers at once."""
    seconds = {}
    for tokens in (512, 512, 32):  # the first time warms up
        start = time.perf_counter()
        target.base_model(torch.zeros(1, tokens, dtype=torch.long).to(target.device))[0].cpu()
        seconds[tokens] = (time.perf_counter() - start) / tokens
    count = sum(turn["role"] == "assistant" for talk in talks for turn in talk)
    written = count * args.answer_max_new_tokens * (args.responses == "target")
    read = sum(len(turn["content"]) for talk in talks for turn in talk) / 4 + written
    rows = args.max_steps * args.batch_size or args.epochs * math.ceil(read / args.total_seq_len)
    theirs, own = (sum(x.numel() for x in model.parameters()) for model in (target, draft))
    slots = args.max_anchors * args.block_size * (own + 2 * draft.lm_head.numel()) / theirs
    minutes = rows * (args.total_seq_len + 3 * slots) * seconds[512] / 60
    memory = theirs * target.dtype.itemsize + 16 * own  # weights; gradients, Adam's two moments
    print(f"ahead: {count} answers, up to {written:,} tokens and {written * seconds[32] / 60:.0f} "
          f"min; {rows} rows, about {minutes:.0f} min; {memory / 1e9:.2f} GB besides activations")

def prepare(args, target, tokenizer):
    """-> documents to train on, prompts to calibrate with, held-out prompts"""
    skipped = collections.Counter()
    rows = dialogues(args.max_samples, seed=1) if args.tiny else read_rows(args.data, skipped)
    talks, tuning, held = held_out(conversations(rows, skipped), args, skipped)
    prompts, texts = questions_of(held, tokenizer, args, skipped)
    tuning, _ = questions_of(tuning, tokenizer, args, skipped)
    require(talks and prompts, f"--data {args.data}: got {len(talks)} conversations to train on and"
            f" {len(prompts)} held-out prompts; both are needed. Skipped: {dict(skipped)}")
    if RANK == 0:
        pathlib.Path(args.save_path, "prompts.json").write_text(json.dumps(texts, indent=1))
        forecast(target, fresh_draft(args, target, tokenizer), talks, args)
    return documents_of(talks, target, tokenizer, args, skipped), tuning, prompts

def run(args):
    started, out = time.time(), pathlib.Path(args.save_path)
    counts = "max_samples max_anchors eval_concurrency eval_max_new_tokens".split()
    require(min(getattr(args, name) for name in counts) > 0, f"{', '.join(counts)}: at least 1")
    weights = args.loss_fn
    require(isinstance(weights, dict) and weights and {*weights} <= {*LOSSES} and
            {*map(type, weights.values())} <= {int, float},
            f"--loss-fn expects weights of {LOSSES}, got {weights}")
    require(args.batch_size >= RANKS, f"--batch-size: at least {RANKS}, one row for each process")
    out.mkdir(parents=True, exist_ok=True)
    if args.tiny and not pathlib.Path(args.verifier_name_or_path).is_dir():
        args.verifier_name_or_path = str(out / "target")
        if RANK == 0:
            make_tiny_target(args, args.verifier_name_or_path)
    gather(None)
    target, tokenizer = load_target(args)
    documents, tuning, prompts = prepare(args, target, tokenizer)
    draft_ids = draft_vocabulary(documents, args.draft_vocab_size, target)
    flags = {name: variant(args, name) if name else args for name in args.compare or [""]}
    drafts = {name: fresh_draft(one, target, tokenizer, draft_ids) for name, one in flags.items()}
    for name, draft in drafts.items():
        train(draft, target, documents, prompts, flags[name])
    if RANK > 0:
        return
    plain = {t: decode(target, None, prompts, args, t) for t in (0, 1)}
    texts = [one.tokens for one in plain[0][0]]
    gamma = next(iter(drafts.values())).config.gamma  # of all of them
    facts = tiny_facts(target, documents, texts, gamma) if args.tiny else {}
    results = {}
    for name, draft in drafts.items():
        results[name] = evaluate(target, draft, prompts, tuning, plain, args)
        draft.save_pretrained(flags[name].save_path)  # with its calibration
    if args.compare:
        print_table(results)
        name = "vanilla" if "vanilla" in results else name
        drafts[name].save_pretrained(out)
    top = {key: {t: x[key] for t, x in results[name].items() if key in x}
           for key in results[name][0]}
    record = dict(
        top, **facts, results=results, seconds=time.time() - started, arguments=vars(args),
        versions=dict(torch=torch.__version__, transformers=transformers.__version__))
    (out / "results.json").write_text(json.dumps(record, indent=1))
    print(f"saved in {out} after {time.time() - started:.0f} s; next: "
          f"python serve_demo.py --draft {out}")

def main():
    p = parser()
    if p.parse_args().tiny:  # in an @FILE, too
        p.set_defaults(**TINY)
    args = p.parse_args()
    args.compare = [*HEADS] if args.compare == [] else args.compare
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        if RANKS > 1:
            if torch.cuda.is_available():
                torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            dist.init_process_group()
        with contextlib.redirect_stdout(open(os.devnull, "w") if RANK > 0 else sys.stdout):
            run(args)
    except ValueError as error:
        p.error(error)

if __name__ == "__main__":
    main()
