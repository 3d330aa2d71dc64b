"""Chat families that rewrite: invitations, stories in the past tense, lists, and how many."""

from . import words
from .chat_tasks import Answer, about, facts, series
from .writer import Family, Writer

ACTIONS = [
    ("walks", "walked", "to the market"), ("opens", "opened", "the window"), ("cleans", "cleaned", "the kitchen"),
    ("paints", "painted", "the fence"), ("visits", "visited", "the museum"), ("cooks", "cooked", "some soup"),
    ("plays", "played", "in the garden"), ("calls", "called", "the office"), ("washes", "washed", "the car"),
    ("carries", "carried", "the bags"), ("helps", "helped", "the neighbour"), ("waits", "waited", "at the station"),
    ("looks", "looked", "at the map"), ("fixes", "fixed", "the old bike"), ("closes", "closed", "the shop"),
    ("buys", "bought", "some bread"), ("writes", "wrote", "a long letter"), ("reads", "read", "the paper"),
    ("takes", "took", "the bus"), ("sings", "sang", "a song"), ("drinks", "drank", "a cup of tea"),
    ("finds", "found", "an old coin"), ("makes", "made", "a paper boat"), ("goes", "went", "to the river"),
]  # fmt: skip
EVENTS = "birthday party|garden party|small concert|chess evening|family dinner|book club|film night|picnic".split("|")
DRINKS = "tea|coffee|juice|milk|water|lemonade".split("|")
BRINGS = "some cake|a salad|warm clothes|a good book|some music|your family|a bottle of juice|a chair".split("|")


def story(w: Writer) -> Answer:
    """Present to past, several sentences about one or two people."""
    people, here = [w.name() for _ in range(w.ask(1, 2))], w.town()
    actions = w.rng.sample(ACTIONS, w.ask(10, 12, 14, 16))
    present, past = [], []
    for i, (now, then, rest) in enumerate(actions):
        who = people[i % len(people)] if i < len(people) or w.chance(0.4) else words.pronoun(people[-1])
        tail = f" in {here}" if i == 0 else f" on {w.rng.choice(words.DAYS)}" if w.chance(0.25) else ""
        present.append(f"{who} {now} {rest}{tail}.")
        past.append(f"{who} {then} {rest}{tail}.")
    w.note((actions[0][0], people[0]))
    request = w.ask("Put this text in the past tense:", "Rewrite in the past tense:", "Change to past tense:")
    text = " ".join(past)
    return [(f"{request} {' '.join(present)}", text)], {"expected": "=" + text}


def invitation(w: Writer) -> Answer:
    """Notes to a short letter whose wording is free."""
    host, guest, town = w.name(), w.name(), w.town()
    event, bring, day, clock = w.one(EVENTS), w.one(BRINGS), w.one(words.DAYS), w.clock()
    food, drink, answer_by, house = w.one(words.THINGS), w.one(DRINKS), w.one(words.DAYS), w.number(2, 99)
    listed = (
        f"From: {host}\nTo: {guest}\nEvent: {event}\nDay: {day}\nTime: {clock}\nPlace: {town}\nHouse: {house}\n"
        f"Food: {food}\nDrink: {drink}\nBring: {bring}\nAnswer by: {answer_by}"
    )
    told = (
        f"{host} invites {guest} to a {event} on {day} at {clock} in {town}, house {house}. There will be {food} and "
        f"{drink}. {guest} should bring {bring} and answer by {answer_by}."
    )
    request = w.ask("Write an invitation with these notes:", "Write a short letter:", "Write an invitation:")
    lines = [
        w.say(f"Dear {guest},", f"Hello {guest},"),
        w.say(
            f"I would like to invite you to a {event}.", f"please come to my {event}.", f"you are invited to a {event}."
        ).capitalize(),
        w.say(f"It is on {day} at {clock} in {town}.", f"We meet on {day} at {clock} in {town}."),
        w.say(f"My house is number {house} in the main street.", f"You find us in house number {house}."),
        w.say(f"There will be {food} and a lot of {drink}.", f"We will have {food} and {drink}."),
        w.say(f"Please bring {bring}.", f"It would be nice if you bring {bring}."),
        w.say(f"Please answer by {answer_by}.", f"Can you tell me by {answer_by} if you come?"),
        w.say("I hope to see you there.", "I look forward to it."),
        w.say(f"Best wishes,\n{host}", f"Yours,\n{host}"),
    ]
    found = [guest, event, day, clock, town, str(house), food, drink, bring, answer_by, host]
    return [(f"{request}\n{w.ask(listed, told)}", "\n".join(lines))], facts(found)


def bullets(w: Writer) -> Answer:
    """What each of several people needs: sentences to lists."""
    people = [w.name() for _ in range(w.ask(3, 4, 5))]
    pool = w.rng.sample(words.THINGS + words.GOODS, 5 * len(people))
    wanted = [[pool.pop() for _ in range(w.ask(3, 4, 5))] for _ in people]
    w.note((wanted[0][0], people[0]))
    form = w.ask("{n} bought {g}.", "{n} needs {g}.", "{n} has {g}.")
    passage = " ".join(form.format(n=n, g=series(g)) for n, g in zip(people, wanted, strict=True))
    text = "\n".join("\n".join([f"{n}:", *(f"- {x}" for x in g)]) for n, g in zip(people, wanted, strict=True))
    request = w.ask("List the things of each person:", "Make a list for each person:", "Turn this into lists:")
    return [(f"{request} {passage}", text)], {"expected": "=" + text}


def table(w: Writer) -> Answer:
    """Several people, each with a thing to bring."""
    people = [w.name() for _ in range(w.ask(5, 6, 8, 10))]
    goods = [w.one(words.THINGS + words.GOODS) for _ in people]
    counts = [w.number(2, 40) for _ in people]
    passage = " ".join(f"{p} brings {n} {g}." for p, n, g in zip(people, counts, goods, strict=True))
    said = [
        w.say(f"{n} {g} come from {p}.", f"{p} brings {n} {g}.") for p, n, g in zip(people, counts, goods, strict=True)
    ]
    request = w.ask("Who brings what? Make a list.", "Make a list of all the things.", "List what comes from whom.")
    found = [f" {n} {g}" for n, g in zip(counts, goods, strict=True)]
    check = {"expected": str(counts[0]), "facts": found, "also": people}
    return [(about(w, passage, request), "\n".join(f"- {line}" for line in said))], check


def headcount(w: Writer) -> Answer:
    """How many people, who and where, for several groups, and how many in all."""
    sizes = [w.ask(2, 3, 4) for _ in range(w.ask(2, 3, 4))]
    groups = [([w.name() for _ in range(size)], w.town()) for size in sizes]
    w.note(tuple(sizes))
    w.note(groups[0][1])
    form = w.ask("{g} went to {t}.", "{g} live in {t}.", "{g} come from {t}.")
    passage = " ".join(form.format(g=series(people), t=town) for people, town in groups)
    lines = []
    for people, town in groups:
        count = words.SMALL_NUMBERS[len(people)]
        usual = f"The text names {count} people for {town}: {series(people)}."
        lines.append(w.say(usual, f"For {town} there are {count} people: {series(people)}."))
    question = w.ask("How many people are named for each town?", "Count the people of each town:")
    found = [x for people, town in groups for x in (town, *people)]
    return [(about(w, passage, question), "\n".join([*lines, f"All together: {sum(sizes)}."]))], {
        "expected": f": {sum(sizes)}.",
        "facts": found,
    }


def week(w: Writer) -> Answer:
    """A diary's lines to sentences."""
    name, count = w.name(), w.ask(3, 4, 5, 6)
    begin = w.rng.randrange(7)
    days = [words.DAYS[(begin + i) % 7] for i in range(count)]
    rows = [(day, w.one(words.HOBBIES), w.town(), w.clock()) for day in days]
    w.note(tuple(days))
    form = w.ask("{d}: {h} in {t} at {c}", "{d}, {c}: {h}, {t}", "{d} - {h} - {t} - {c}")
    diary = "\n".join(form.format(d=d, h=h, t=t, c=c) for d, h, t, c in rows)
    request = w.ask(
        f"Write this diary of {name} as sentences:",
        f"What does {name} do this week?",
        f"Turn the plans of {name} into sentences:",
    )
    forms = "On {d} {n} goes to {t} for {h} at {c}.", "On {d} at {c} {n} goes to {t} for {h}."
    said = "\n".join(w.say(*forms).format(n=name, d=d, h=h, t=t, c=c) for d, h, t, c in rows)
    check = {"expected": rows[0][2], "facts": [row[0] for row in rows], "also": [x for row in rows for x in row[1:]]}
    return [(f"{request}\n{diary}", said)], check


FAMILIES: list[Family] = [story, invitation, bullets, table, headcount, week]
