"""Serve prompts through a trained draft, and see what speculative decoding does to them.

    python serve_demo.py --prompt "Why is the sky blue?" --temperature 1 --schedule 0.5

Each text is printed with its tokens coloured by origin, draft or target. Counters and speed follow,
against plain decoding of the same prompts by the same loop in the same run:
    rounds           target forwards of a request, without the prompt's, which gives the first token
    drafted          tokens the draft proposed; verified: those the schedule sent to the target
    accepted         those the target agreed to, before a stop token or the budget cuts the text
    accepted_length  tau, tokens per round: 1 + accepted / rounds
    forwards         rounds of the whole batch: verify_ms of the target and draft_ms of the rest
"""
import argparse
import contextlib
import json
import os
import sys
import time
from pathlib import Path

import huggingface_hub
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from dspark import DSparkDraft, generate, probabilities, stopwatch, total

QUESTIONS = ["Why is the sky blue?", "How far is 2 hours at 72 km/h?", "Write FizzBuzz in Python."]
COLOURS = {"draft": "\x1b[32m{}\x1b[0m", "correction": "\x1b[33m{}\x1b[0m",
           "bonus": "\x1b[94m{}\x1b[0m"}  # green, yellow, blue
BRACKETS = {"draft": "[{}]"}  # where there is no terminal

def refuse(message):
    raise ValueError(message)  # one line and exit code 2, see the end of the file

def schedule(text):  # 1 verifies one draft, 1.0 those of confidence 1
    return text if text == "full" else float(text) if "." in text else int(text)

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
        "draft), or those before the first with a confidence below 0.5 (%(default)s)")
    add("--max-concurrency", type=int, default=1, help="prompts decoded at a time (%(default)s)")
    add("--markov-top-k", type=int, default=0, help="draft from the k best base logits (0: all)")
    add("--draft-sampling", choices=("sample", "argmax"), default="sample", help="argmax drafts "
        "greedily at any temperature, better without a Markov head (%(default)s)")
    add("--seed", type=int, default=0, help="makes temperature > 0 repeatable (%(default)s)")
    add("--json", type=Path, help="file to write tokens, counters and times to (none)")
    add("--html", type=Path, help="page to write that shows the decoding round by round (none)")
    add("--plot", type=Path, metavar="FOLDER", help="only draw what train.py --compare and --bench "
        "--json FOLDER/bench.json wrote into FOLDER (none)")
    args = parser.parse_args(argv)
    if args.prompt and args.prompts or min(args.max_new_tokens, args.max_concurrency) < 1:
        refuse("--max-new-tokens and --max-concurrency start at 1; --prompt excludes --prompts")
    if args.plot and not args.plot.is_dir():
        refuse(f"--plot {args.plot}: name a folder with results.json or bench.json")
    for path in filter(None, (args.json, args.html)):
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
        return rows[: None if args.prompts else 4] or refuse("it is empty")

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

def decode(args, target, draft, prompts, stops, show=lambda one: None, **changes):
    """One timed pass -> Generations, numbers, Rounds. show: texts appear when they are done; that
    time is taken out. changes: arguments of `generate` other than the flags say."""
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
    hidden, top = round.hidden[:, : prev.shape[1]], args.markov_top_k or len(draft.draft_ids)
    base, ids = draft.base_logits(hidden)[:, first:].topk(min(top, len(draft.draft_ids)))
    markov = draft.heads(hidden, prev)[0][:, first:].gather(-1, ids)  # [R, g, C]
    filters, ids = (args.temperature, args.top_k, args.top_p), draft.draft_ids[ids]
    own = (ids == drafts[..., None]).long().argmax(-1, keepdim=True)  # where the drafted token is
    for logits in (base, markov):
        p = probabilities(logits, *(filters if args.temperature else (1.0,)))
        index = torch.cat([p.topk(min(3, p.shape[-1])).indices, own], -1)
        shown = zip(ids.gather(-1, index).tolist(), p.gather(-1, index).tolist())
        yield [[[(label(tokenizer, token), share) for token, share in zip(*slot)]
                for slot in zip(*row)] for row in shown]

def stories(args, tokenizer, draft, results, rounds):
    """The rounds of each request as the page draws them; `end`: tokens of text after a round."""
    told = [[] for _ in results]
    for round in rounds:
        blank = [[None] * len(row) for row in round.drafts]
        best = (blank, blank) if round.hidden is None else candidates(
            args, tokenizer, draft, round)
        columns = zip(round.drafts, round.confidence or blank, *best)
        for i, (one, row) in enumerate(zip(round.requests, columns)):
            slots = [dict(token=label(tokenizer, token), confidence=trust, base=base, markov=markov)
                     for token, trust, base, markov in zip(*row)]
            end = (told[one.index][-1]["end"] if told[one.index] else 1) + round.accepted[i] + 1
            told[one.index].append(dict(
                anchor=label(tokenizer, round.anchors[i]), slots=slots, kept=round.lengths[i],
                accepted=round.accepted[i], next=label(tokenizer, round.next_tokens[i]),
                end=min(end, len(one.tokens))))
    return told

def write_page(args, tokenizer, draft, texts, results, rounds):
    requests = [dict(prompt=text, origins=one.origins, pieces=pieces(tokenizer, one.tokens),
                     rounds=story) for text, one, story in zip(
                         texts, results, stories(args, tokenizer, draft, results, rounds))]
    about = (f"draft {args.draft.name}, {draft.config.gamma} tokens per block, temperature "
             f"{args.temperature:g}, schedule {args.schedule}")
    data = json.dumps(dict(about=about, requests=requests)).replace("<", "\\u003c")  # no </script>
    page = (Path(__file__).parent / "assets" / "trace.html").read_text()
    args.html.write_text(page.replace("__TRACE__", data))

# --------------------------------------------------------------------------- --plot: the pictures
def acceptance(results):
    """Paper Fig. 2: the share accepted among drafts that the target judged, at temperature 1."""
    shares = {name: one["1"]["conditional_acceptance"] for name, one in results.items()}
    return "draft position", "accepted, if those before it were", {
        name: (range(1, 1 + len(share)), share) for name, share in shares.items()}

def thresholds(rounds):
    """Paper Fig. 5, from rounds that verified whole blocks: a threshold would have cut them."""
    confidence, hits = (torch.tensor([one[key] for one in rounds])
                        for key in ("confidence", "accepted"))
    steps = [i / 20 for i in range(20)]
    sent = [(confidence >= step).long().cumprod(1).sum(1) for step in steps]  # [N] each
    right = [torch.minimum(lengths, hits) for lengths in sent]
    rate = [float(a.sum() / n.sum()) if n.any() else 1.0 for a, n in zip(right, sent)]
    return "threshold on the confidence", "share", {
        "accepted / verified": (steps, rate),
        "verified / drafted": (steps, [float(n.sum() / confidence.numel()) for n in sent]),
        "accepted / accepted without a threshold": (
            steps, [float(a.sum() / hits.sum()) for a in right])}

def reliability(rounds):
    """Paper Fig. 6: predicted survival of a prefix against how often it survived, in ten bins."""
    hits, lines = torch.tensor([one["accepted"] for one in rounds]), {"perfect": ([0, 1], [0, 1])}
    for label, key in (("raw", "raw"), ("calibrated", "confidence")):
        survival = torch.tensor([one[key] for one in rounds]).cumprod(1)  # [N, gamma]
        lived = hits[:, None] > torch.arange(survival.shape[1])
        bins = (10 * survival).long().clamp(max=9)
        cells = [bins == i for i in bins.unique()]
        lines[label] = [[float(x[cell].float().mean()) for cell in cells]
                        for x in (survival, lived)]
    return "predicted survival", "survived", lines

def against_load(column, words):
    """Paper Fig. 8: a column of the bench, by schedule."""
    def lines(rows):
        names = dict.fromkeys(row["schedule"] for row in rows)
        points = {name: [(str(row["requests"]), row[column]) for row in rows
                         if row["schedule"] == name] for name in names}
        return "requests at a time", words, {name: [*zip(*pairs)] for name, pairs in points.items()}
    return lines

def training(curves):
    return "step", "accepted length (teacher-forced)", {
        name: [[row[key] for row in rows] for key in ("step", "tau")]
        for name, rows in curves.items()}

FIGURES = {"acceptance": ("results", acceptance), "training": ("curves", training),
           "thresholds": ("rounds", thresholds), "reliability": ("rounds", reliability),
           "throughput": ("rows", against_load("tokens_per_second", "tokens per second")),
           "budget": ("rows", against_load("verified_length", "drafts verified per round"))}

def plot(folder):
    """Draw what the files in `folder` allow, into it, and name what is missing."""
    with explained("--plot needs matplotlib (pip install matplotlib)"):
        from matplotlib.figure import Figure
    data = {}
    for path in filter(Path.is_file, (folder / "results.json", folder / "bench.json")):
        data.update(json.loads(path.read_text()))
    data["curves"] = {path.parent.name: [*map(json.loads, path.read_text().splitlines())]
                      for path in sorted(folder.glob("**/metrics.jsonl"))}
    for name, (source, lines) in FIGURES.items():
        if not data.get(source):
            print(f"{name}: not drawn, {source} missing in {folder}")
            continue
        across, up, series = lines(data[source])
        figure = Figure(figsize=(6, 4), layout="constrained")
        axes = figure.subplots()
        for label, (x, y) in series.items():
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
    for model in (draft, None):  # warm-up: the first forwards allocate memory and choose kernels
        decode(args, target, model, prompts[:1], stops, max_new_tokens=min(8, args.max_new_tokens))
    show = printer(tokenizer, texts)
    results, fast, rounds = decode(args, target, draft, prompts, stops, show)
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
    if args.json:
        requests = [dict(prompt=text, **counters(one), tokens=one.tokens, origins=one.origins,
                         pieces=pieces(tokenizer, one.tokens), plain_tokens=other.tokens)
                    for text, one, other in zip(texts, results, others)]
        report = dict(arguments=vars(args), device=str(target.device), torch=torch.__version__,
                      transformers=transformers.__version__, requests=requests, total=whole,
                      speculative=fast, plain=plain, divergences=parted)
        args.json.write_text(json.dumps(report, default=str) + "\n")

if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        print(f"serve_demo.py: {error}", file=sys.stderr)
        sys.exit(2)
