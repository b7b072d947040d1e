"""Serve prompts through a trained draft, and see what speculative decoding does to them.

    python serve_demo.py --prompt "Why is the sky blue?" --temperature 1 --schedule 0.5

Each text is printed with its tokens coloured by origin, draft or target. Counters and speed follow,
against plain decoding of the same prompts by the same loop in the same run:
    rounds           target forwards of a request, without the prompt's, which gives the first token
    drafted          tokens the draft proposed; verified: those the schedule sent to the target
    accepted         those the target agreed to, before a stop token or the budget cuts the text
    accepted_length  tau, tokens per round: 1 + accepted / rounds
    forwards         rounds of the whole batch: verify_ms of the target and draft_ms of the rest
--html writes a page to step through the rounds. --bench compares plain decoding and all schedules:
    verified_length  drafts verified per request and round; acceptance_rate: accepted / verified
    per_request      tokens_per_second / requests at a time; times_plain: against plain decoding
    schedule_ms      of a round, replayed on the recorded confidences, and taken out of draft_ms
--plot draws what train.py --compare and --bench wrote.
"""
import argparse
import collections
import contextlib
import functools
import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path

import huggingface_hub
import torch
import transformers
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from dspark import (DSparkDraft, StaleBudget, StepCosts, choose_lengths, generate, probabilities,
                    profile_draft_seconds, profile_steps_per_second, stopwatch, total)

QUESTIONS = ["Why is the sky blue?", "How far is 2 hours at 72 km/h?", "Write FizzBuzz in Python."]
COLOURS = {"draft": "\x1b[32m{}\x1b[0m", "correction": "\x1b[33m{}\x1b[0m",
           "bonus": "\x1b[94m{}\x1b[0m"}  # green, yellow, blue
BRACKETS = {"draft": "[{}]"}  # where there is no terminal

def refuse(message):
    raise ValueError(message)  # one line and exit code 2, see the end of the file

def schedule(text):  # 1 verifies one draft, 1.0 those of confidence 1
    return text if text in ("full", "prefix") else float(text) if "." in text else int(text)

def parse_arguments(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog="(...): default")
    parser.error = lambda message: refuse(f"{message} (all flags: --help)")  # without the usage
    add = parser.add_argument_group("models").add_argument
    add("--draft", type=Path, default="output", help="folder of the draft (%(default)s)")
    add("--verifier-name-or-path", help="the target (DRAFT/target, else as DRAFT/config.json says)")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of both (%(default)s)")
    add = parser.add_argument_group("prompts").add_argument
    add("--prompt", nargs="+", help="one or more (four of DRAFT/prompts.json, else some questions)")
    add("--prompts", type=Path, help=".jsonl file with `prompt` or `turns`, or text, one a line")
    add("--enable-thinking", action=argparse.BooleanOptionalAction, help="(as trained)")
    add = parser.add_argument_group("decoding and output").add_argument
    add("--max-new-tokens", type=int, default=128, help="budget of each prompt (%(default)s)")
    add("--temperature", type=float, default=0.0, help="0 is greedy (%(default)s)")
    add("--top-p", type=float, default=1.0, help="keep the likeliest this much (%(default)s)")
    add("--top-k", type=int, default=0, help="sample from the k likeliest tokens (0: all)")
    add("--schedule", type=schedule, default="full", help="verify all drafts (full), 3 (0: do not "
        "draft), those before the first with a confidence below 0.5, or what pays, by Algorithm 1 "
        "(prefix) (%(default)s)")
    add("--max-concurrency", type=int, default=1, help="prompts decoded at a time (%(default)s)")
    add("--markov-top-k", type=int, default=0, help="draft from the k best base logits (0: all)")
    add("--draft-sampling", choices=("sample", "argmax"), default="sample", help="argmax drafts "
        "greedily at any temperature, better without a Markov head (%(default)s)")
    add("--seed", type=int, default=0, help="makes temperature > 0 repeatable (%(default)s)")
    add("--json", type=Path, help="file to write all numbers and tokens to (none)")
    add("--html", type=Path, help="page to write that shows the decoding round by round (none)")
    add = parser.add_argument_group("measuring").add_argument
    add("--bench", action="store_true", help="compare plain decoding and all schedules, then end")
    add("--concurrency", type=int, nargs="+", default=[1, 4, 16], metavar="R",
        help="prompts decoded at a time by --bench (%(default)s)")
    add("--repeats", type=int, default=3, help="--bench takes medians of so many (%(default)s)")
    add("--costs", type=Path, help="--json of a --bench whose cost curves to use (measure them)")
    add("--plot", type=Path, metavar="FOLDER", help="draw what train.py --compare and --bench "
        "--json FOLDER/bench.json wrote into FOLDER, then end")
    args = parser.parse_args(argv)
    if args.prompt and args.prompts or min(
            args.max_new_tokens, args.max_concurrency, args.repeats, *args.concurrency) < 1:
        refuse("tokens, repeats and prompts at a time start at 1; --prompt excludes --prompts")
    for path in filter(None, (args.json, args.html, args.plot and args.plot / "acceptance.png")):
        if path.is_dir() or not path.absolute().parent.is_dir():
            refuse(f"cannot write {path}: name a file in a folder that exists")
    return args

@contextlib.contextmanager
def explained(hint):
    """Loaders fail in many ways and many lines: say what to do, then the first line of theirs."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{hint}; {type(error).__name__}: {error}".split("\n")[0]) from error

def on_disk_only(name):
    """Ask the hub once: transformers alone would retry, loudly, for most of a minute."""
    with contextlib.suppress(Exception):
        return os.path.isdir(name) or not huggingface_hub.HfApi().model_info(name, timeout=5)
    return True

def load(args):
    """-> target, tokenizer, draft, the draft's config.json"""
    with explained(f"no draft in {args.draft}: run train.py first, or name a draft with --draft"):
        config = json.loads((args.draft / "config.json").read_text())
        stored = config.get("speculators_config", {}).get("verifier", {})
    own = args.draft / "target"
    name = args.verifier_name_or_path or (str(own) if own.is_dir() else stored.get("name_or_path"))
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    with explained(f"no target {name}: give its folder or hub name with --verifier-name-or-path"):
        local = dict(local_files_only=on_disk_only(name))
        tokenizer = AutoTokenizer.from_pretrained(name, **local)
        target = AutoModelForCausalLM.from_pretrained(name, dtype=args.dtype, **local)
        target.to("cuda" if cuda else "mps" if mps else "cpu")
    with explained(f"draft {args.draft} cannot be used with target {name}"):
        draft = DSparkDraft.from_pretrained(args.draft, target).to(target.dtype)
    print(f"target {name}, {args.dtype} on {target.device}\ndraft {args.draft}, gamma "
          f"{draft.config.gamma}, sample_from_anchor {draft.config.sample_from_anchor}")
    return target, tokenizer, draft, config

def read_prompts(args):
    """What was asked for, or held-out prompts of the training, or ordinary questions."""
    path = args.prompts or args.draft / "prompts.json"
    if args.prompt or not (args.prompts or path.is_file()):
        return args.prompt or QUESTIONS
    with explained(f"no prompts in {path}: expected one a line"):
        text = path.read_text(encoding="utf-8-sig")
        rows = json.loads(text) if path.suffix == ".json" else filter(str.strip, text.split("\n"))
        rows = map(json.loads, rows) if path.suffix == ".jsonl" else rows
        rows = [row if type(row) is str else row.get("prompt") or row["turns"][0] for row in rows]
        return rows[: None if args.prompts or args.bench else 4] or refuse("it is empty")

def encode(args, tokenizer, config, texts):
    """Token ids of the prompts, by the chat template, in the draft's thinking mode."""
    trained, asked = config.get("dspark_extra", {}).get("enable_thinking"), args.enable_thinking
    if None not in (trained, asked) and trained != asked:
        print(f"warning: the draft was trained with enable_thinking={trained}", file=sys.stderr)
    options = dict(add_generation_prompt=True, tokenize=True, return_dict=False,
                   enable_thinking=bool(trained if asked is None else asked))
    with explained("a prompt cannot be encoded: give it some text"):
        all(text.strip() for text in texts) or refuse("it is empty")
        if not tokenizer.chat_template:
            return [tokenizer(text).input_ids for text in texts]
        chats = ([{"role": "user", "content": text}] for text in texts)
        return [tokenizer.apply_chat_template(chat, **options) for chat in chats]

def pieces(tokenizer, tokens):
    """The text each token adds; a character spread over several tokens comes with its last.

    Tokens decoded one by one would tear such characters and, in some tokenizers, lose spaces: so
    prefixes are decoded, and a piece is what a prefix has more than the one before.
    """
    texts, before = [], ""
    for n in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:n], skip_special_tokens=True)
        text = text if n == len(tokens) else text.rstrip("\ufffd")  # an unfinished character
        texts.append(text[len(before):])
        before = max(before, text, key=len)
    return texts

def paint(texts, origins, styles):
    """Each text in the style of its origin.

    >>> paint(["The", " quick", " brown", " fox"], ["first", "draft", "draft", "bonus"], BRACKETS)
    'The[ quick][ brown] fox'
    """
    pairs = ((text, styles.get(origin, "{}")) for text, origin in zip(texts, origins))
    return "".join(style.format(text) for text, style in pairs if text)

def printer(tokenizer, texts):
    """-> a function that prints a request that is done; texts: the prompts"""
    styles = COLOURS if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else BRACKETS
    origins = ("first", "draft", "correction", "bonus")
    print("tokens:", paint(["first ", "accepted draft", " correction ", "bonus"], origins, styles))
    def show(one):
        text = paint(pieces(tokenizer, one.tokens), one.origins, styles)
        print(f"\n> {texts[one.index]}\n{text}", flush=True)
    return show

def decode(args, target, draft, prompts, stops, tables=(), show=lambda one: None, **changes):
    """One timed pass -> Generations, numbers, Rounds. tables: of the costs; show: texts appear when
    they are done, and that time is taken out; changes: what `generate` gets instead of the flags'.
    """
    pause, rounds = 0.0, []
    def on_done(one):
        nonlocal pause
        began = time.perf_counter()
        show(one)
        pause += time.perf_counter() - began
    options = dict(
        max_new_tokens=args.max_new_tokens, temperature=args.temperature, top_k=args.top_k,
        top_p=args.top_p, stop_token_ids=stops, schedule=args.schedule,
        max_concurrency=args.max_concurrency, markov_top_k=args.markov_top_k,
        draft_sampling=args.draft_sampling, generator=torch.Generator().manual_seed(args.seed))
    if tables:
        options.update(steps_per_second=tables[0], draft_seconds=tables[1].seconds)
    with stopwatch(target) as seconds:
        results = generate(target, draft, prompts, on_round=rounds.append, on_done=on_done,
                           **{**options, **changes})
    took, tokens = seconds["all"] - pause, sum(len(one.tokens) for one in results)
    rest, ms = took - seconds["target"] - seconds["prefill"], 1000 / max(len(rounds), 1)
    numbers = dict(tokens=tokens, seconds=took, tokens_per_second=tokens / took,
                   forwards=len(rounds), draft_ms=rest * ms, verify_ms=seconds["target"] * ms)
    return results, numbers, rounds

def counters(one):
    names = "rounds drafted verified accepted accepted_length acceptance_by_position".split()
    return {name: getattr(one, name) for name in names[: 6 if one.rounds else 4]}

def print_table(rows):
    """rows: pairs of a label and {heading: number}; lists are left out"""
    names = [name for name, value in rows[-1][1].items() if type(value) is not list]
    print(f"\n{'':32}", *names, sep="  ")
    for label, row in rows:
        texts = {name: f"{n:.2f}" if type(n) is float else f"{n}" for name, n in row.items()}
        cells = (texts.get(name, "-").rjust(len(name)) for name in names)
        print(f"{' '.join(label.split())[:32]:32}", *cells, sep="  ")

@torch.no_grad()
def compare(args, target, fast, plain):
    """Where greedy texts part, and how far apart the target's two best logits are there."""
    if args.temperature:
        return print("texts not compared: two random draws from the same distribution")
    parted = []
    for number, (one, other) in enumerate(zip(fast, plain), 1):
        if one.tokens != other.tokens:
            at = len(os.path.commonprefix([one.tokens, other.tokens]))  # works on lists
            ids = torch.tensor([one.prompt + one.tokens[:at]], device=target.device)
            logits = target(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0, -1]
            best, second = logits.float().topk(2).values.tolist()
            parted.append(dict(prompt=number, position=at, gap=best - second))
            print(f"prompt {number} parts after {at} tokens, top-2 logit gap {best - second:.2g}")
    print(f"texts identical to plain decoding: {len(fast) - len(parted)} of {len(fast)}")
    if parted:
        print("Rounding depends on how many tokens a forward carries, in bfloat16 from the third\n"
              "digit on, and decides near ties. A gap beyond rounding would be a fault.")
    return parted

def serve(args, target, draft, prompts, stops, tokenizer, texts):
    """Speculative and plain decoding of the prompts, shown and compared -> report for --json"""
    tables = cost_tables(args, target, draft, args.max_concurrency)
    for model in (draft, None):  # warm-up: the first forwards allocate memory and choose kernels
        decode(args, target, model, prompts[:1], stops, tables,
               max_new_tokens=min(8, args.max_new_tokens))
    show = printer(tokenizer, texts)
    results, fast, rounds = decode(args, target, draft, prompts, stops, tables, show)
    others, plain, _ = decode(args, target, None, prompts, stops)
    whole = counters(total(results))
    print_table([*zip(texts, map(counters, results)), ("all", whole)])
    shares = whole.get("acceptance_by_position", [])
    print("acceptance by position:", *(f"{share:.2f}" for share in shares))
    print_table([("speculative", fast), ("plain", plain)])
    print(f"speed-up {fast['tokens_per_second'] / plain['tokens_per_second']:.2f}")
    parted = compare(args, target, results, others)
    if args.html:
        write_page(args, tokenizer, draft, texts, results, rounds)
    requests = [dict(prompt=text, **counters(one), tokens=one.tokens, origins=one.origins,
                     pieces=pieces(tokenizer, one.tokens), plain_tokens=other.tokens)
                for text, one, other in zip(texts, results, others)]
    return dict(requests=requests, total=whole, speculative=fast, plain=plain, divergences=parted)

# ----------------------------------------------------------------------- --html: round by round
def label(tokenizer, token):
    """A token by itself, also where it is special or part of a character."""
    text = tokenizer.decode([token])
    if text and "\ufffd" not in text:
        return text
    return tokenizer.convert_ids_to_tokens(token) or f"<{token}>"

@torch.no_grad()
def candidates(args, tokenizer, draft, round):
    """What the draft saw in each slot, by its backbone alone and with the Markov head: two [R][g]
    lists of (token, probability), the three best and the one drafted. At temperature 0 those of
    temperature 1."""
    first, drafts = draft.config.first_slot, torch.tensor(round.drafts, device=round.hidden.device)
    anchors = drafts.new_tensor(round.anchors)[:, None]
    prev = torch.cat([anchors.expand(-1, 1 + first), drafts[:, :-1]], 1)  # [R, first + g]
    hidden, size = round.hidden[:, : prev.shape[1]], len(draft.draft_ids)
    base, ids = draft.base_logits(hidden)[:, first:].topk(args.markov_top_k or size)
    markov = draft.heads(hidden, prev)[0][:, first:].gather(-1, ids)  # [R, g, C]
    filters, ids = (args.temperature, args.top_k, args.top_p), draft.draft_ids[ids]
    own = (ids == drafts[..., None]).long().argmax(-1, keepdim=True)  # where the drafted token is
    for logits in (base, markov):
        p = probabilities(logits, *(filters if args.temperature else (1.0,)))
        index = torch.cat([p.topk(min(3, p.shape[-1])).indices, own], -1)
        shown = zip(ids.gather(-1, index).tolist(), p.gather(-1, index).tolist())
        yield [[[(label(tokenizer, token), share) for token, share in zip(*slot)]
                for slot in zip(*row)] for row in shown]

def page_round(args, tokenizer, draft, round):
    """A Round as the page reads it: texts for token ids, indices for requests, and candidates."""
    name, base, markov = functools.partial(label, tokenizer), None, None
    if round.hidden is not None:
        base, markov = candidates(args, tokenizer, draft, round)
    return dict(round._asdict(), requests=[one.index for one in round.requests], base=base,
                anchors=[*map(name, round.anchors)], next_tokens=[*map(name, round.next_tokens)],
                drafts=[[*map(name, row)] for row in round.drafts], markov=markov, hidden=None)

def write_page(args, tokenizer, draft, texts, results, rounds):
    """The template with the trace as JSON in its one place."""
    data = dict(
        about=f"draft {args.draft.name}, {draft.config.gamma} tokens per block, temperature "
              f"{args.temperature:g}, schedule {args.schedule}",
        requests=[dict(prompt=text, pieces=pieces(tokenizer, one.tokens), origins=one.origins)
                  for text, one in zip(texts, results)],
        rounds=[page_round(args, tokenizer, draft, round) for round in rounds])
    page = (Path(__file__).parent / "assets" / "trace.html").read_text()
    text = json.dumps(data).replace("<", "\\u003c")  # a model can write </script>
    args.html.write_text(page.replace("__TRACE__", text))

# -------------------------------------------------------------------- --bench: schedules compared
def cost_tables(args, target, draft, requests):
    """-> StepCosts of target forwards and of drafting, measured here or given back by --costs; none
    where no schedule needs them"""
    if not args.bench and args.schedule != "prefix":
        return ()
    if args.costs:
        with explained(f"no costs in {args.costs}: expected --json of --bench --concurrency "
                       f"{requests}"):
            saved = json.loads(args.costs.read_text())["costs"][str(requests)]
            costs, drafting = (
                StepCosts(one["sizes"], one["measured"], one["low"]) for one in saved)
    else:
        costs = profile_steps_per_second(target, requests, draft.config.gamma)
        drafting = profile_draft_seconds(target, draft, requests, temperature=args.temperature,
                                         markov_top_k=args.markov_top_k)
    print(f"\ntokens of a target forward, {requests} requests\n{costs}")
    return costs, drafting

def schedules(gamma, requests, costs, drafting):
    """What is compared: name -> schedule"""
    def rounds_per_second(size):
        return 1 / (drafting.seconds(requests) + costs.stairs(size))
    fixed = {f"first {k}": k for k in range(1, 1 + gamma)}
    return {"plain": 0, **fixed, "threshold 0.5": 0.5, "prefix": "prefix",
            "stale budget": StaleBudget(rounds_per_second)}

def measure(work, schedule, requests, tables):
    """One timed pass -> a row of the table, Rounds"""
    results, row, rounds = decode(*work, tables, schedule=schedule, max_concurrency=requests)
    seen = [torch.tensor(round.confidence) for round in rounds if round.confidence]
    began, whole = time.perf_counter(), total(results)
    for confidence in seen:
        choose_lengths(schedule, confidence, whole.gamma, len(confidence), tables[0],
                       tables[1].seconds)
    schedule_ms = 1000 * (time.perf_counter() - began) / len(rounds)
    speed, draft_ms = row["tokens_per_second"], row["draft_ms"] - schedule_ms
    return dict(
        verified_length=whole.verified / whole.rounds, accepted_length=whole.accepted_length,
        acceptance_rate=whole.accepted / max(whole.verified, 1), tokens_per_second=speed,
        per_request=speed / requests, draft_ms=draft_ms, verify_ms=row["verify_ms"],
        schedule_ms=schedule_ms), rounds

def full_blocks(rounds):
    """For --plot: confidence, raw and calibrated, and accepted drafts, without the last round of a
    request, which a stop token or the budget may have cut."""
    last = {one.index: round for round in rounds for one in round.requests}
    return [dict(calibrated=trust, raw=torch.tensor(logits).sigmoid().tolist(), accepted=accepted)
            for round in rounds for one, trust, logits, accepted in zip(
                round.requests, round.confidence, round.confidence_logits, round.accepted)
            if round is not last[one.index]]

def compare_schedules(work, gamma, requests, tables):
    """Interleaved passes, the first a warm-up -> {schedule: medians}, full blocks"""
    rows, rounds = collections.defaultdict(list), {}
    for _ in range(1 + work[0].repeats):
        named = schedules(gamma, requests, *tables).items()  # anew: a StaleBudget remembers
        for name, one in tqdm(named, f"{requests} at a time", leave=False, disable=None):
            row, rounds[name] = measure(work, one, requests, tables)
            rows[name].append(row)
    medians = {name: {key: statistics.median(row[key] for row in seen[1:]) for key in seen[0]}
               for name, seen in rows.items()}
    for row in medians.values():
        row["times_plain"] = row["tokens_per_second"] / medians["plain"]["tokens_per_second"]
    return medians, full_blocks(rounds[f"first {gamma}"])

def bench(args, target, draft, prompts, stops):
    """Every schedule at every concurrency, on the same prompts -> report for --json"""
    report, words = dict(costs={}, rows=[]), []
    for requests in args.concurrency:
        tables = cost_tables(args, target, draft, requests)
        batch = [*itertools.islice(itertools.cycle(prompts), max(requests, 4))]
        rows, report["blocks"] = compare_schedules(
            (args, target, draft, batch, stops), draft.config.gamma, requests, tables)
        print_table([(f"{requests} at a time: {name}", row) for name, row in rows.items()])
        report["rows"] += [dict(requests=requests, schedule=name, **rows[name]) for name in rows]
        report["costs"][requests] = [
            dict(sizes=one.sizes, measured=one.measured, fitted=one.fitted, low=one.low)
            for one in tables]
        best = max(rows, key=lambda name: rows[name]["times_plain"])
        gain = f"{best} ({rows[best]['times_plain']:.2f} times plain decoding)"
        words.append(f"at {requests} {'nothing beats plain' if best == 'plain' else gain}")
    print(f"\nFastest by requests at a time: {', '.join(words)}.")
    return report

# --------------------------------------------------------------------------- --plot: the pictures
def by_threshold(blocks):
    """Fig. 5, from rounds that verified whole blocks: where a threshold would have cut them"""
    trust, hits = (torch.tensor([one[key] for one in blocks]) for key in ("calibrated", "accepted"))
    points = []
    for threshold in (i / 20 for i in range(20)):
        sent = (trust >= threshold).long().cumprod(1).sum(1)  # [N]
        right = torch.minimum(sent, hits).sum()
        shares = right / sent.sum().clamp(min=1), sent.sum() / trust.numel(), right / hits.sum()
        points.append((threshold, *map(float, shares)))
    across, *shares = zip(*points)
    names = "accepted / verified", "verified / drafted", "accepted / accepted without threshold"
    return {name: (across, share) for name, share in zip(names, shares)}

def by_prediction(blocks):
    """Fig. 6: predicted survival of a prefix against how often it survived, in ten bins"""
    hits, lines = torch.tensor([one["accepted"] for one in blocks]), {"ideal": ([0, 1], [0, 1])}
    for name in ("raw", "calibrated"):
        survival = torch.tensor([one[name] for one in blocks]).cumprod(1)  # [N, gamma]
        lived = (hits[:, None] > torch.arange(survival.shape[1])).float()
        bins = (10 * survival).long().clamp(max=9)
        lines[name] = [[float(x[bins == i].mean()) for i in bins.unique()]
                       for x in (survival, lived)]
    return lines

def by_load(rows, column):
    """Fig. 8: a column of the bench against the requests at a time"""
    lines = collections.defaultdict(lambda: ([], []))
    for row in rows:
        lines[row["schedule"]][0].append(str(row["requests"]))
        lines[row["schedule"]][1].append(row[column])
    return lines

def pictures(folder):
    """File name -> labels of x and y, {line: (x, y)}; without lines where the data is missing"""
    data = dict(results={}, rows=[], blocks=[])
    for path in filter(Path.is_file, (folder / "results.json", folder / "bench.json")):
        data.update(json.loads(path.read_text()))
    logs = {path.parent.name: [*map(json.loads, path.read_text().splitlines())]
            for path in sorted(folder.glob("**/metrics.jsonl"))}
    curves = {name: [[row[key] for row in rows] for key in ("step", "tau")]
              for name, rows in logs.items()}
    shares = {name: one["1"]["conditional_acceptance"] for name, one in data["results"].items()}
    blocks, rows = data["blocks"], data["rows"]
    return {
        "acceptance": ("draft position", "accepted, if those before it were (temperature 1)",
                       {name: (range(1, 1 + len(y)), y) for name, y in shares.items()}),  # Fig. 2
        "training": ("step", "accepted length, teacher-forced", curves),
        "threshold": ("threshold on the confidence", "share", blocks and by_threshold(blocks)),
        "reliability": ("predicted survival", "survived", blocks and by_prediction(blocks)),
        "throughput": ("requests at a time", "tokens/s", by_load(rows, "tokens_per_second")),
        "budget": ("requests at a time", "verified drafts", by_load(rows, "verified_length"))}

def plot(folder):
    with explained("--plot needs matplotlib (pip install matplotlib)"):
        from matplotlib.figure import Figure
    for name, (across, up, lines) in pictures(folder).items():
        if not lines:
            print(f"{name}: not drawn, its data is not in {folder}")
            continue
        figure = Figure(figsize=(6, 4), layout="constrained")
        axes = figure.subplots()
        for label, (x, y) in lines.items():
            axes.plot(x, y, ".-", label=label)
        axes.set(xlabel=across, ylabel=up)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
        figure.savefig(folder / f"{name}.png", dpi=120)
        print(f"{name}: {folder / name}.png")

def main(argv=None):
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    args = parse_arguments(argv)
    if args.plot:
        return plot(args.plot)
    texts = read_prompts(args)
    target, tokenizer, draft, config = load(args)
    prompts, stops = encode(args, tokenizer, config, texts), target.generation_config.eos_token_id
    stops = {*(stops if isinstance(stops, list) else [stops]), tokenizer.eos_token_id} - {None}
    work = (args, target, draft, prompts, stops)
    report = bench(*work) if args.bench else serve(*work, tokenizer, texts)
    if args.json:
        report = dict(arguments=vars(args), device=str(target.device), torch=torch.__version__,
                      transformers=transformers.__version__, **report)
        args.json.write_text(json.dumps(report, default=str) + "\n")

if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        print(f"serve_demo.py: {error}", file=sys.stderr)
        sys.exit(2)
