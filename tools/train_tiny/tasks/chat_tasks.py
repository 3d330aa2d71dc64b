"""Conversations about a given passage: questions, rewriting, lists, letters, comparisons, follow-up questions."""

from collections.abc import Sequence
from typing import Any

from . import words
from .writer import Family, Writer

Answer = tuple[list[tuple[str, str]], dict[str, Any]]
Question = tuple[str, str, str]
"""A question, the sentence that answers it, and the fact that the sentence must contain."""


def about(w: Writer, passage: str, request: str) -> str:
    """A passage and a request, in one of the orders the training text knows."""
    return w.ask(f"{passage}\n{request}", f"Read this: {passage}\n{request}", f"Text: {passage}\nQuestion: {request}")


def facts(found: Sequence[str]) -> dict[str, Any]:
    """Check that all of `found` occur in this order; `expected` repeats the first for readers of one fact."""
    return {"expected": found[0], "facts": list(found)}


def series(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def conversation(w: Writer, passage: str, questions: list[Question]) -> Answer:
    """A numbered list of questions, now and then one, or (training only) one after the other in turns."""
    mode = w.ask("one", "list", "list", "list", "list", "list", "list", "turns")
    if mode == "one" or len(questions) == 1:
        question, answer, fact = w.rng.choice(questions)
        return [(about(w, passage, question), answer)], facts([fact])
    questions = questions[: w.ask(5, 6, 7, 8)]
    if mode == "turns" and not w.held_out:
        first, *rest = questions
        turns = [(about(w, passage, first[0]), first[1])]
        return turns + [(question, answer) for question, answer, _ in rest], facts([rest[-1][2]])
    asked = "\n".join(f"{i}. {question}" for i, (question, _, _) in enumerate(questions, 1))
    answered = "\n".join(f"{i}. {answer}" for i, (_, answer, _) in enumerate(questions, 1))
    lead = w.ask("Answer these questions:", "Please answer:", "Questions:")
    return [(f"{passage}\n{lead}\n{asked}", answered)], facts([fact for _, _, fact in questions])


class Person:
    """Invented facts about someone, as notes, as sentences of a passage and as questions."""

    def __init__(self, w: Writer, count: int, like: list[int] | None = None) -> None:
        """The age and count - 1 other rows in any order; with `like`, those rows in that order."""
        self.name = name = w.name()
        self.age = age = w.number(18, 79)
        self.he = he = words.pronoun(name)
        his = "Her" if he == "She" else "His"
        town, job, pet = w.town(), w.one(words.JOBS), w.one(words.PETS)
        colour, hobby = w.one(words.COLOURS), w.one(words.HOBBIES)
        friend, clock = w.name(), w.clock()
        rows: list[tuple[str, str, str, str, str]] = [
            ("Age", str(age), w.ask(f"{name} is {age} years old.", f"{name} turned {age} this year."),
             w.ask(f"How old is {name}?", f"What is the age of {name}?"), f"{name} is {age} years old."),
            ("Town", town, w.ask(f"{he} lives in {town}.", f"{his} home is in {town}."),
             w.ask(f"Where does {name} live?", f"In which town does {name} live?"), f"{name} lives in {town}."),
            ("Job", job, w.ask(f"{he} works as a {job}.", f"{his} job is {job}."),
             w.ask(f"What is the job of {name}?", f"What does {name} do for work?"), f"{name} works as a {job}."),
            ("Pet", pet, w.ask(f"{he} has a {pet}.", f"{his} pet is a {pet}."),
             w.ask(f"What pet does {name} have?", f"Which animal does {name} have?"), f"{name} has a {pet}."),
            ("Colour", colour, w.ask(f"{his} favourite colour is {colour}.", f"{he} likes {colour} best."),
             w.ask(f"What is the favourite colour of {name}?", f"Which colour does {name} like best?"),
             w.say(f"The favourite colour of {name} is {colour}.", f"{name} likes {colour} best.")),
            ("Hobby", hobby, w.ask(f"{his} hobby is {hobby}.", f"{he} enjoys {hobby}."),
             w.ask(f"What is the hobby of {name}?", f"What does {name} enjoy?"),
             w.say(f"The hobby of {name} is {hobby}.", f"{name} enjoys {hobby}.")),
            ("Friend", friend, w.ask(f"{his} best friend is {friend}.", f"{friend} is {his.lower()} best friend."),
             w.ask(f"Who is the best friend of {name}?", f"What is the name of the friend of {name}?"),
             f"The best friend of {name} is {friend}."),
            ("Morning", clock, w.ask(f"{he} gets up at {clock}.", f"{his} day begins at {clock}."),
             w.ask(f"When does {name} get up?", f"At what time does {name} get up?"), f"{name} gets up at {clock}."),
        ]  # fmt: skip
        self.kept = w.rng.sample(range(1, len(rows)), count - 1) if like is None else like
        self.rows = [rows[0], *(rows[i] for i in self.kept)]

    @property
    def passage(self) -> str:
        return " ".join(row[2] for row in self.rows)

    @property
    def questions(self) -> list[Question]:
        return [(question, answer, value) for _, value, _, question, answer in self.rows]

    def sentences(self, w: Writer) -> tuple[str, list[str]]:
        """The rows as free sentences, the first with the name, and the facts in order."""
        he, his = self.he, "Her" if self.he == "She" else "His"
        forms = {
            "Age": ("{n} is {v} years old.", "{n} is {v}."),
            "Town": (f"{he} lives in {{v}}.", f"{his} home is in {{v}}."),
            "Job": (f"{he} works as a {{v}}.", f"{his} job is {{v}}."),
            "Pet": (f"{he} has a {{v}}.", f"{his} pet is a {{v}}."),
            "Colour": (f"{his} favourite colour is {{v}}.", f"{he} likes {{v}} best."),
            "Hobby": (f"{his} hobby is {{v}}.", f"{he} enjoys {{v}}."),
            "Friend": (f"{his} best friend is {{v}}.", f"{he} has a friend called {{v}}."),
            "Morning": (f"{he} gets up at {{v}}.", f"{his} day begins at {{v}}."),
        }
        text = [w.say(*forms[row[0]]).format(n=self.name, v=row[1]) for row in self.rows]
        return " ".join(text), [self.name, *(row[1] for row in self.rows)]


def person(w: Writer) -> Answer:
    someone = Person(w, w.ask(5, 6, 7, 8))
    questions = someone.questions
    w.rng.shuffle(questions)
    return conversation(w, someone.passage, questions)


def one_of_two(w: Writer) -> Answer:
    """All that a text says of one of two people."""
    one, two = Person(w, w.ask(6, 7, 8)), Person(w, w.ask(6, 7, 8))
    chosen = w.ask(one, two)
    request = w.ask(f"What do you learn about {chosen.name}?", f"Tell me all about {chosen.name}.")
    text = " ".join(answer for _, answer, _ in chosen.questions)
    passage = f"{one.passage} {two.passage}"
    return [(about(w, passage, request), text)], facts([chosen.name, *(row[1] for row in chosen.rows)])


def profile(w: Writer) -> Answer:
    """Notes to sentences, of one or two people."""
    people = [Person(w, w.ask(5, 6, 7)) for _ in range(w.ask(1, 2))]
    notes = "\n".join(f"Name: {p.name}\n" + "\n".join(f"{row[0]}: {row[1]}" for row in p.rows) for p in people)
    written = [p.sentences(w) for p in people]
    request = w.ask("Write a short text with these notes:", "Turn these notes into sentences:", "Describe them:")
    text = "\n".join(
        w.say("", f"This is {p.name}. ", f"Let me introduce {p.name}. ") + text
        for p, (text, _) in zip(people, written, strict=True)
    )
    return [(f"{request}\n{notes}", text)], facts([fact for _, found in written for fact in found])


def notes(w: Writer) -> Answer:
    """Sentences to notes, sorted by person."""
    people = [Person(w, w.ask(4, 5, 6)) for _ in range(w.ask(2, 2, 3))]
    passage = " ".join(p.passage for p in people)
    text = "\n".join("\n".join([f"About {p.name}:", *(f"- {row[0]}: {row[1]}" for row in p.rows)]) for p in people)
    request = w.ask("Make notes about everyone:", "List the facts for each person:", "Sort the facts by person:")
    return [(f"{request} {passage}", text)], {"expected": "=" + text}


DIFFERENCES = {
    "Age": "{a} is {x} years old, {but} {b} is {y}.",
    "Town": "{a} lives in {x}, {but} {b} lives in {y}.",
    "Job": "{a} works as a {x}, {but} {b} works as a {y}.",
    "Pet": "{a} has a {x}, {but} {b} has a {y}.",
    "Colour": "{a} likes {x}, {but} {b} likes {y}.",
    "Hobby": "{a} enjoys {x}, {but} {b} enjoys {y}.",
    "Friend": "The friend of {a} is {x}, {but} the friend of {b} is {y}.",
    "Morning": "{a} gets up at {x}, {but} {b} gets up at {y}.",
}


def contrast(w: Writer) -> Answer:
    """Two people side by side."""
    one = Person(w, w.ask(5, 6, 7))
    two = Person(w, len(one.rows), one.kept)
    lines, found = [], []
    for row, other_row in zip(one.rows, two.rows, strict=True):
        other, form = other_row[1], DIFFERENCES[row[0]]
        lines.append(form.format(a=one.name, b=two.name, x=row[1], y=other, but=w.say("but", "while")))
        found += [row[1], other]
    request = w.ask("Compare these two people:", "How are these two different?", "Compare them:")
    return [(f"{request} {one.passage} {two.passage}", " ".join(lines))], facts(found)


def shop(w: Writer) -> Answer:
    name, town, owner, opens, closes = f"{w.name()}'s Shop", w.town(), w.name(), w.clock(), w.clock()
    goods = [(w.one(words.GOODS), w.number(2, 60)) for _ in range(3)]
    listed = series([f"{thing} for {price} dollars" for thing, price in goods])
    passage = w.ask(
        f"{name} in {town} belongs to {owner}. It opens at {opens} and closes at {closes}. It sells {listed}.",
        f"In {town} there is {name}. It is open from {opens} to {closes}. "
        f"The owner is {owner}. You can buy {listed} there.",
    )
    sold = series([thing for thing, _ in goods])
    questions: list[Question] = [
        (w.ask(f"When does {name} open?", f"At what time does {name} open?"), f"{name} opens at {opens}.", opens),
        (w.ask(f"When does {name} close?", f"At what time does {name} close?"), f"{name} closes at {closes}.", closes),
        (w.ask(f"What does {name} sell?", "What can you buy there?"), f"{name} sells {sold}.", sold),
        (w.ask(f"Where is {name}?", f"In which town is {name}?"), f"{name} is in {town}.", town),
        (w.ask(f"Whose shop is {name}?", "Who is the owner?"), f"{name} belongs to {owner}.", owner),
    ]
    for thing, price in goods:
        asked = w.ask(f"What is the price of {thing}?", f"What does {thing} cost there?")
        questions.append((asked, f"The price of {thing} is {price} dollars.", f" {price} "))
    w.rng.shuffle(questions)
    return conversation(w, passage, questions)


def trains(w: Writer) -> Answer:
    """A timetable: questions about rows, or all rows as sentences."""
    count = w.ask(3, 4, 5, 6)
    platforms = w.rng.sample(range(1, 10), count)
    rows = [(w.town(), w.clock(), platform) for platform in platforms]
    form = w.ask("{h}: {t}, platform {p}", "{t}: {h}, platform {p}", "Train to {t}, {h}, platform {p}")
    table = "\n".join(form.format(t=t, h=h, p=p) for t, h, p in rows)
    if w.ask(True, True, False):
        request = w.ask("Write a sentence for every train:", "Write this timetable as sentences:")
        forms = "The train to {t} leaves at {h} from platform {p}.", "At {h} the train to {t} leaves from platform {p}."
        said = "\n".join(w.say(*forms).format(t=t, h=h, p=p) for t, h, p in rows)
        return [(f"{request}\n{table}", said)], {
            "expected": rows[0][0],
            "facts": [f"platform {p}" for _, _, p in rows],
            "also": [x for t, h, _ in rows for x in (t, h)],
        }
    questions: list[Question] = []
    for t, h, p in rows:
        asked = w.ask(f"When does the train to {t} leave?", f"What time is the train to {t}?")
        questions.append((asked, f"The train to {t} leaves at {h}.", h))
        asked = w.ask(f"Which platform is for {t}?", f"From which platform does the train to {t} leave?")
        questions.append((asked, f"The train to {t} leaves from platform {p}.", f"platform {p}."))
    return conversation(w, table, questions)


FAMILIES: list[Family] = [person, one_of_two, profile, notes, contrast, shop, trains]
