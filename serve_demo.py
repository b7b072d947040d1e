"""Serve prompts through a trained draft, and see what speculative decoding does to them.

    python serve_demo.py --prompt "Why is the sky blue?" --temperature 1 --schedule 0.5

Texts are printed with their tokens coloured by origin, then counters, and speeds next to those of
plain decoding of the same prompts by the same loop in the same run, a round of each in turn:
    rounds           target forwards of a request, without the prompt's, which gives the first token
    drafted          tokens the draft proposed; verified: those the schedule sent to the target
    accepted         those the target agreed to, before a stop token or the budget cuts the text
    verified_length  verified / rounds; acceptance_rate: accepted / verified
    accepted_length  tau, tokens per round: 1 + accepted / rounds
    per_request      tokens_per_second / requests at a time; times_plain: against plain decoding
    verify_ms        target forward of a round; schedule_ms: choosing what to verify, replayed on
                     the recorded confidences; draft_ms: the rest of the round
--html writes a page to step through the rounds, --bench compares plain decoding and all schedules
on all prompts (again and again up to 4 R, at least 8; each schedule keeps a cache of its own),
--plot draws what train.py --compare and --bench --json FOLDER/bench.json wrote into a FOLDER.
"""
import argparse
import contextlib
import functools
import json
import os
import statistics
import sys
import threading
import time
from pathlib import Path

import numpy
import torch
import transformers
from huggingface_hub import snapshot_download
from tqdm import tqdm

from dspark import (DSparkDraft, StepCosts, choose_lengths, generate, packed, probabilities,
                    profile_draft_seconds, profile_steps_per_second, require, stopwatch, total)

QUESTIONS = ["Why is the sky blue?", "How far is 2 hours at 72 km/h?", "Write FizzBuzz in Python."]
COUNTERS = "rounds drafted verified accepted accepted_length".split()
COLOURS = dict(first="{}", draft="\x1b[32m{}\x1b[0m", correction="\x1b[33m{}\x1b[0m",
               bonus="\x1b[94m{}\x1b[0m")  # green, yellow, blue
BRACKETS = dict(COLOURS, draft="[{}]", correction="{}", bonus="{}")  # where there is no terminal

def schedule(text):
    """1 verifies one draft, 1.0 the surest"""
    return text if text in ("full", "prefix") else json.loads(text)

def parse_arguments(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.error = lambda message: require(False, message)
    add = parser.add_argument_group("models").add_argument
    add("--draft", type=Path, default="output", help="folder of the draft")
    add("--verifier-name-or-path", help="else DRAFT/target, or as DRAFT/config.json says")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of both")
    add("--enable-thinking", action=argparse.BooleanOptionalAction, help="else as trained")
    add = parser.add_argument_group("prompts").add_mutually_exclusive_group().add_argument
    add("--prompt", nargs="+", help="else four of DRAFT/prompts.json, or some questions")
    add("--prompts", type=Path, help=".jsonl file with `prompt` or `turns`, or text, one a line")
    add = parser.add_argument_group("decoding and output").add_argument
    add("--max-new-tokens", type=int, default=128, help="budget of each prompt")
    add("--stop", metavar="TEXT", help="end an answer after a token that contains this, too")
    add("--temperature", type=float, default=0.0, help="0 is greedy")
    add("--top-p", type=float, default=1.0, help="keep the likeliest this much")
    add("--top-k", type=int, default=0, help="sample from the k likeliest tokens (0: all)")
    add("--schedule", type=schedule, default="full", help="verify all drafts (full), 3 (0: do not "
        "draft), those before the first with a confidence below 0.5, or what pays (prefix)")
    add("--markov-top-k", type=int, default=0, help="draft from the k best base logits (0: all)")
    add("--seed", type=int, default=0, help="makes temperature > 0 repeatable")
    add("--json", type=Path, help="file to write all numbers and tokens to")
    add("--html", type=Path, help="page to write that shows the decoding round by round")
    add = parser.add_argument_group("measuring").add_argument
    add("--bench", action="store_true", help="compare plain decoding and all schedules, then end")
    add("--concurrency", type=int, nargs="+", default=[1, 4, 16], metavar="R",
        help="prompts decoded at a time; the first is used without --bench")
    add("--repeats", type=int, default=3, help="--bench takes medians of so many")
    add("--costs", type=Path, help="--json of a --bench whose cost curves to use, else measured")
    add("--plot", type=Path, metavar="FOLDER", help="draw its results.json, bench.json, then end")
    args = parser.parse_args(argv)
    require(min(args.max_new_tokens, args.repeats, *args.concurrency) > 0,
            "tokens, repeats and prompts at a time start at 1")
    for path in filter(None, (args.json, args.html, args.plot and args.plot / "budget.png")):
        require(path.absolute().parent.is_dir() and not path.is_dir(),
                f"cannot write {path}: name a file in a folder that exists")
    return args

@contextlib.contextmanager
def explained(hint):
    """Loaders fail in many ways and many lines: say what to do, then the first line of theirs."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{hint}; {type(error).__name__}: {error}".split("\n")[0]) from error

def load(args):
    """-> target, whose generation config then lists all stop tokens, tokenizer, draft"""
    with explained(f"no draft in {args.draft}: run train.py first, or name a draft with --draft"):
        config = json.loads((args.draft / "config.json").read_text())
    stored, own = config.get("speculators_config", {}).get("verifier", {}), args.draft / "target"
    name = args.verifier_name_or_path or (str(own) if own.is_dir() else stored.get("name_or_path"))
    with explained(f"no target {name}: give its folder or hub name with --verifier-name-or-path"):
        kinds = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
        folder = name if Path(name).is_dir() else snapshot_download(  # asks the hub once
            name, allow_patterns=kinds, etag_timeout=5)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        target = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=args.dtype)
    target.to("cuda" if torch.cuda.is_available() else "cpu")  # MPS has no float64
    draft = DSparkDraft.from_pretrained(args.draft, target).to(target.dtype)
    stops = target.generation_config.eos_token_id
    stops = stops if isinstance(stops, list) else [stops]
    if args.stop is not None:
        found = [one for one in range(len(tokenizer)) if args.stop in tokenizer.decode([one])]
        require(args.stop and found, f"--stop: expected text within one token, got {args.stop!r}")
        stops = stops + found
    target.generation_config.eos_token_id = sorted({*stops, tokenizer.eos_token_id} - {None})
    print(f"target {name}, {args.dtype} on {target.device}")
    return target, tokenizer, draft

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
    return rows if args.prompts or args.bench else rows[:4]

def encode(args, tokenizer, draft, texts):
    """Token ids of the prompts, by the chat template, in the draft's thinking mode."""
    require(texts and all(type(text) is str and text.strip() for text in texts),
            "expected prompts, each with some text")
    trained, asked = draft.config.dspark_extra.get("enable_thinking"), args.enable_thinking
    if None not in (trained, asked) and trained != asked:
        print(f"warning: the draft was trained with enable_thinking={trained}", file=sys.stderr)
    if not tokenizer.chat_template:
        return tokenizer(texts).input_ids
    return tokenizer.apply_chat_template(
        [[{"role": "user", "content": text}] for text in texts], add_generation_prompt=True,
        return_dict=False, enable_thinking=bool(trained if asked is None else asked))

def pieces(tokenizer, tokens):
    """The text each token adds: what a decoded prefix has more than the one before. Tokens decoded
    one by one would lose spaces and tear characters, which here come with their last token."""
    prefixes = (tokens[:n] for n in range(len(tokens) + 1))
    texts = [tokenizer.decode(ids, skip_special_tokens=True).rstrip("\ufffd") for ids in prefixes]
    return [text[len(before):] for before, text in zip(texts, texts[1:])]

def show(requests):
    """Texts, every token in the style of its origin, and counters; first what the styles mean"""
    styles = COLOURS if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else BRACKETS
    print("\ntokens:", *(style.format(origin) for origin, style in styles.items()))
    for one in requests:
        texts = (styles[origin].format(text) for text, origin in zip(one["pieces"], one["origins"]))
        print(f"\n> {one['prompt']}", "".join(texts), sep="\n")
        print(*(f"{name} {one[name]:.5g}" for name in COUNTERS), sep=", ")

# ------------------------------------------------------------ measured: a pass, its row, its table
def in_turn(target, jobs):
    """Run jobs {name: job(pause)} up to their next pause(), in turn, so that a machine that slows
    down slows all alike -> {name: result}, {name: seconds: in all, of forwards, of prefills}"""
    results, spent = {}, {name: numpy.zeros(3) for name in jobs}
    hub, go = threading.Semaphore(0), {name: threading.Semaphore(0) for name in jobs}

    def pause(name):
        hub.release()
        go[name].acquire()

    def run(name):
        go[name].acquire()
        try:
            results[name] = jobs[name](functools.partial(pause, name))
        except Exception as error:
            results[name] = error
        hub.release()

    for name in jobs:
        threading.Thread(target=run, args=[name], daemon=True).start()
    with stopwatch(target) as clock, packed(target):
        while live := [name for name in jobs if name not in results]:
            for name in live:
                spent[name] -= time.perf_counter(), clock["target"], clock["prefill"]
                go[name].release()
                hub.acquire()
                spent[name] += time.perf_counter(), clock["target"], clock["prefill"]
    for error in results.values():
        if isinstance(error, Exception):
            raise error
    return results, spent

def measure(args, target, draft, prompts, ways, requests, costs=None, drafting=None):
    """Decode by all schedules {name: schedule}, `requests` prompts at a time, a round of each in
    turn -> {name: Generations}, {name: numbers}, {name: Rounds}"""
    draft_seconds, rounds = drafting and drafting.seconds, {name: [] for name in ways}
    bar = tqdm(total=len(prompts) * len(ways), unit="answer", leave=False, disable=None)

    def job(name, pause):
        def on_round(round):
            rounds[name].append(round)
            bar.update(sum(one.done for one in round.requests))
            pause()
        return generate(
            target, draft, prompts, args.max_new_tokens, args.temperature, args.top_k, args.top_p,
            target.generation_config.eos_token_id, ways[name], costs, draft_seconds, requests,
            args.markov_top_k, on_round=on_round,
            generator=torch.Generator().manual_seed(args.seed))

    with bar:
        results, spent = in_turn(target, {name: functools.partial(job, name) for name in ways})
    rows = {}
    for name, (took, verify, prefill) in spent.items():
        seen = [torch.tensor(round.confidence) for round in rounds[name] if round.confidence]
        with stopwatch(target) as choosing:
            for c in seen:
                choose_lengths(ways[name], c, c.shape[1], len(c), costs, draft_seconds)
        whole, each = total(results[name]), 1000 / max(len(rounds[name]), 1)
        rest = took - verify - prefill - choosing["all"]
        speed = sum(len(one.tokens) for one in results[name]) / took
        rows[name] = dict(
            verified_length=whole.verified / max(whole.rounds, 1),
            acceptance_rate=whole.accepted / max(whole.verified, 1),
            accepted_length=1 + whole.accepted / max(whole.rounds, 1),
            tokens_per_second=speed, per_request=speed / requests, draft_ms=each * rest,
            verify_ms=each * verify, schedule_ms=each * choosing["all"])
    return results, rows, rounds

def print_speeds(requests, rows):
    """rows: {schedule: numbers of `measure`}, to which the speed-up is added"""
    for row in rows.values():
        row["times_plain"] = row["tokens_per_second"] / rows["plain"]["tokens_per_second"]
    print(f"\n{f'{requests} at a time':16}", *row, sep="  ")
    for name, row in rows.items():
        print(f"{name:16}", *(f"{value:{len(key)}.2f}" for key, value in row.items()), sep="  ")

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
            print(f"prompt {number} parts after {at} tokens, top-2 logit gap {best - second:.2g} "
                  "(rounding decides near ties; a gap beyond it would be a fault)")
    print(f"texts identical to plain decoding: {len(fast) - len(parted)} of {len(fast)}")
    return parted

def serve(args, target, draft, prompts, tokenizer, texts):
    """Speculative and plain decoding of the prompts, shown and compared -> report for --json"""
    work, at_a_time = (args, target, draft, prompts), min(args.concurrency[0], len(prompts))
    costs = cost_tables(args, target, draft, at_a_time) if args.schedule == "prefix" else ()
    ways = dict(speculative=args.schedule, plain=0)
    texts_of, rows, rounds_of = measure(*work, ways, at_a_time, *costs)
    (results, others), rounds = texts_of.values(), rounds_of["speculative"]
    requests = [dict(vars(one), prompt=text, pieces=pieces(tokenizer, one.tokens),
                     plain_tokens=other.tokens, rounds=one.rounds, verified=one.verified,
                     accepted=one.accepted, accepted_length=1 + one.accepted / max(one.rounds, 1))
                for text, one, other in zip(texts, results, others)]
    show(requests)
    shares = total(results).acceptance_by_position if rounds else []
    print("\nall: acceptance by position", *(f"{share:.2f}" for share in shares))
    print_speeds(at_a_time, rows)
    parted = compare(args, target, results, others)
    if args.html:
        write_page(args, tokenizer, draft, requests, rounds)
    return dict(requests=requests, **rows, divergences=parted, acceptance_by_position=shares)

# ----------------------------------------------------------------------- --html: round by round
def labels(tokenizer, tokens):
    """A token by itself, or lists of them; its number where it is only part of a character."""
    if isinstance(tokens, list):
        return [labels(tokenizer, one) for one in tokens]
    text = tokenizer.decode([tokens])
    return text if text and "\ufffd" not in text else f"<{tokens}>"

@torch.no_grad()
def candidates(args, tokenizer, draft, round):
    """What the draft saw in each slot, by its backbone alone and with the Markov head: two [R][g]
    lists of (token, probability), the three best and the one drafted; at temperature 0 as at 1."""
    first, drafts = draft.config.first_slot, torch.tensor(round.drafts, device=round.hidden.device)
    anchors = drafts.new_tensor(round.anchors)[:, None]
    prev = torch.cat([anchors.expand(-1, 1 + first), drafts[:, :-1]], 1)  # [R, first + g]
    hidden = round.hidden[:, : prev.shape[1]]
    own = (draft.draft_ids == drafts[..., None]).long().argmax(-1, keepdim=True)  # [R, g, 1]
    for logits in (draft.base_logits(hidden), draft.heads(hidden, prev)[0]):
        p = probabilities(logits[:, first:], args.temperature or 1.0, args.top_k, args.top_p)
        index = torch.cat([p.topk(3).indices, own], -1)  # [R, g, 4]
        texts = labels(tokenizer, draft.draft_ids[index].tolist())
        rows = zip(texts, p.gather(-1, index).tolist())
        yield [[[*zip(*slot)] for slot in zip(*row)] for row in rows]

def write_page(args, tokenizer, draft, requests, rounds):
    """The template with the trace as JSON in its one place: texts for token ids, candidates"""
    about = f"draft {args.draft.name}, temperature {args.temperature:g}, schedule {args.schedule}"
    trace = dict(about=about, requests=requests, rounds=[])
    for round in rounds:
        base, markov = candidates(args, tokenizer, draft, round) if round.drafts[0] else ([], [])
        trace["rounds"].append(dict(
            round._asdict(), requests=[one.index for one in round.requests], hidden=None, base=base,
            markov=markov, anchors=labels(tokenizer, round.anchors),
            drafts=labels(tokenizer, round.drafts),
            next_tokens=labels(tokenizer, round.next_tokens)))
    text = json.dumps(trace).replace("<", "\\u003c")  # a model can write </script>
    page = (Path(__file__).parent / "assets" / "trace.html").read_text(encoding="utf-8")
    args.html.write_text(page.replace("__TRACE__", text), encoding="utf-8")

# -------------------------------------------------------------------- --bench: schedules compared
def cost_tables(args, target, draft, requests):
    """-> StepCosts of target forwards and of drafting, measured here or given back by --costs"""
    require(draft.confidence_head, "this draft has no confidence head, so nothing to schedule by: "
            "only --schedule full or a number of drafts")
    if args.costs:
        with explained(f"{args.costs}: not the --json of a --bench --concurrency {requests}"):
            saved = json.loads(args.costs.read_text())["costs"][str(requests)]
            return [StepCosts(one["sizes"], one["measured"], one["low"]) for one in saved]
    costs = profile_steps_per_second(target, requests, draft.config.gamma)
    print(f"\ntokens of a target forward, {requests} requests\n{costs}")
    return costs, profile_draft_seconds(target, draft, requests, temperature=args.temperature,
                                        markov_top_k=args.markov_top_k)

def full_blocks(rounds):
    """For --plot: confidence, raw and calibrated, and accepted drafts, without the last round of a
    request, which a stop token or the budget may have cut."""
    return [dict(calibrated=trust, raw=torch.tensor(logits).sigmoid().tolist(), accepted=accepted)
            for round, later in zip(rounds, rounds[1:]) for one, trust, logits, accepted in zip(
                round.requests, round.confidence, round.confidence_logits, round.accepted)
            if one in later.requests]

def bench(args, target, draft, prompts):
    """Every schedule at every concurrency, on the same prompts -> report for --json"""
    report, words = dict(costs={}, rows=[]), []
    for requests in args.concurrency:
        costs, drafting = cost_tables(args, target, draft, requests)
        fixed = {"plain": 0, **{f"first {k}": k for k in range(1, 1 + draft.config.gamma)}}
        ways = {**fixed, "threshold 0.5": 0.5, "prefix": "prefix"}
        size = max(4 * requests, len(prompts), 8)  # requests join and leave
        work = args, target, draft, (prompts * size)[:size]
        found = [measure(*work, ways, requests, costs, drafting)[1] for _ in range(args.repeats)]
        rows = {name: {key: statistics.median(rows[name][key] for rows in found) for key in row}
                for name, row in found[0].items()}
        print_speeds(requests, rows)
        report["rows"] += [dict(requests=requests, schedule=name, **rows[name]) for name in rows]
        report["costs"][requests] = [vars(costs), vars(drafting)]
        best = max(rows, key=lambda name: rows[name]["times_plain"])
        gain = f"{best} ({rows[best]['times_plain']:.2f} times plain decoding)"
        words.append(f"at {requests} {'nothing beats plain decoding' if best == 'plain' else gain}")
    report["blocks"] = full_blocks(measure(*work, {"full": "full"}, requests)[2]["full"])
    print(f"\nFastest by requests at a time: {', '.join(words)}.")
    return report

# --------------------------------------------------------------------------- --plot: the pictures
def by_threshold(blocks):
    """Fig. 5, from rounds that verified whole blocks: where a threshold would have cut them"""
    trust, hits = (torch.tensor([one[key] for one in blocks]) for key in ("calibrated", "accepted"))
    across = torch.arange(20) / 20
    sent = (trust >= across[:, None, None]).long().cumprod(2).sum(2)  # [20, N]
    right, sent = torch.minimum(sent, hits).sum(1), sent.sum(1)
    shares = {"accepted / verified": right / sent.clamp(min=1),
              "verified / drafted": sent / trust.numel(),
              "accepted / accepted without threshold": right / hits.sum()}
    return {name: zip(across, share) for name, share in shares.items()}

def by_prediction(blocks):
    """Fig. 6: predicted survival of a prefix against how often it survived, in ten bins"""
    hits, lines = torch.tensor([one["accepted"] for one in blocks]), {"ideal": [(0, 0), (1, 1)]}
    for name in ("raw", "calibrated"):
        survival = torch.tensor([one[name] for one in blocks]).cumprod(1)  # [N, gamma]
        lived = (hits[:, None] > torch.arange(survival.shape[1])).float()
        bins = (10 * survival).long().clamp(max=9)
        lines[name] = [(survival[bins == i].mean(), lived[bins == i].mean()) for i in bins.unique()]
    return lines

def by_load(rows, column):
    """Fig. 8: a column of the bench against the requests at a time"""
    lines = {row["schedule"]: [] for row in rows}
    for row in rows:
        lines[row["schedule"]].append((str(row["requests"]), row[column]))
    return lines

def plot(folder):
    """Pictures of the data that is there; a line is a name and points (x, y)."""
    data = dict(results={}, rows=[], blocks=[])
    for path in filter(Path.is_file, (folder / "results.json", folder / "bench.json")):
        data.update(json.loads(path.read_text()))
    rows, blocks, load = data["rows"], data["blocks"], "requests at a time"
    shares = {name: enumerate(one["1"]["conditional_acceptance"], 1)
              for name, one in data["results"].items()}  # Fig. 2
    steps = {path.parent.name: map(json.loads, path.open())
             for path in sorted(folder.glob("**/metrics.jsonl"))}
    curves = {name: [(row["step"], row["tau"]) for row in found if "tau" in row]  # else no anchor
              for name, found in steps.items()}
    draw(folder, "acceptance", "draft position", "accepted, if those before it were", shares)
    draw(folder, "training", "step", "accepted length, teacher-forced", curves)
    draw(folder, "threshold", "threshold", "share", blocks and by_threshold(blocks))
    draw(folder, "reliability", "predicted survival", "lived", blocks and by_prediction(blocks))
    draw(folder, "throughput", load, "tokens/s", by_load(rows, "tokens_per_second"))
    draw(folder, "budget", load, "verified drafts", by_load(rows, "verified_length"))

def draw(folder, name, across, up, lines):
    with explained("--plot needs matplotlib (pip install matplotlib)"):
        from matplotlib import colormaps, figure
    if not lines:
        return print(f"{name}: not drawn, its data is not in {folder}")
    axes = figure.Figure(figsize=(6, 4), layout="constrained").subplots()
    axes.set_prop_cycle(color=colormaps["tab20"].colors)  # up to 20 lines that differ
    for line, points in lines.items():
        axes.plot(*zip(*points), ".-", label=line)
    axes.set(xlabel=across, ylabel=up)
    axes.legend(fontsize="small")
    axes.figure.savefig(folder / f"{name}.png", dpi=120)
    print(f"{name}: {folder / name}.png")

def main(argv=None):
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    args = parse_arguments(argv)
    if args.plot:
        return plot(args.plot)
    texts = read_prompts(args)
    target, tokenizer, draft = load(args)
    work = args, target, draft, encode(args, tokenizer, draft, texts)
    for model in (draft, None):  # warm-up: the first forwards allocate memory and choose kernels
        generate(target, model, work[3][:1], min(8, args.max_new_tokens), args.temperature)
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
