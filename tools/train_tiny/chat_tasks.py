"""Conversations about a given passage: questions, rewriting, lists, letters, comparisons, follow-up questions."""

from __future__ import annotations

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
    questions = questions[: w.ask(3, 4, 5, 6)]
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
        ]  # fmt: skip
        self.kept = w.rng.sample(range(1, len(rows)), count - 1) if like is None else like
        self.rows = [rows[0], *(rows[i] for i in self.kept)]

    @property
    def passage(self) -> str:
        return " ".join(row[2] for row in self.rows)

    @property
    def questions(self) -> list[Question]:
        return [(question, answer, value) for _, value, _, question, answer in self.rows]

    def told(self, w: Writer) -> tuple[str, list[str]]:
        """The rows as free sentences, the first with the name, and the facts in order."""
        he, his = self.he, "Her" if self.he == "She" else "His"
        forms = {
            "Age": ("{n} is {v} years old.", "{n} is {v}."),
            "Town": (f"{he} lives in {{v}}.", f"{his} home is in {{v}}."),
            "Job": (f"{he} works as a {{v}}.", f"{his} job is {{v}}."),
            "Pet": (f"{he} has a {{v}}.", f"{his} pet is a {{v}}."),
            "Colour": (f"{his} favourite colour is {{v}}.", f"{he} likes {{v}} best."),
            "Hobby": (f"{his} hobby is {{v}}.", f"{he} enjoys {{v}}."),
        }
        text = [w.say(*forms[row[0]]).format(n=self.name, v=row[1]) for row in self.rows]
        return " ".join(text), [self.name, *(row[1] for row in self.rows)]


def person(w: Writer) -> Answer:
    someone = Person(w, w.ask(3, 4, 5, 6))
    questions = someone.questions
    w.rng.shuffle(questions)
    return conversation(w, someone.passage, questions)


def two_people(w: Writer) -> Answer:
    """All that a text says of one of two people, or of both, as sentences or as notes."""
    one, two = Person(w, w.ask(3, 4)), Person(w, w.ask(3, 4))
    passage = f"{one.passage} {two.passage}"
    if w.ask(True, True, True, False):
        listed = [f"- {row[0]}: {row[1]}" for row in one.rows], [f"- {row[0]}: {row[1]}" for row in two.rows]
        text = "\n".join([f"About {one.name}:", *listed[0], f"About {two.name}:", *listed[1]])
        request = w.ask("Make notes about both:", "List the facts for each person:", "Sort the facts by person:")
        return [(f"{request} {passage}", text)], {"expected": "=" + text}
    chosen = w.ask(one, two)
    request = w.ask(f"What do you learn about {chosen.name}?", f"Tell me all about {chosen.name}.")
    told = " ".join(answer for _, answer, _ in chosen.questions)
    return [(about(w, passage, request), told)], facts([chosen.name, *(row[1] for row in chosen.rows)])


def profile(w: Writer) -> Answer:
    """Notes to sentences."""
    someone = Person(w, w.ask(4, 5, 6))
    notes = f"Name: {someone.name}\n" + "\n".join(f"{row[0]}: {row[1]}" for row in someone.rows)
    text, found = someone.told(w)
    request = w.ask(
        "Write a short text about this person:", "Turn these notes into sentences:", "Describe this person:"
    )
    opener = w.say("", f"This is {someone.name}. ", f"Let me introduce {someone.name}. ")
    return [(f"{request}\n{notes}", opener + text)], facts(found)


def notes(w: Writer) -> Answer:
    """Sentences to notes."""
    someone = Person(w, w.ask(4, 5, 6))
    text = f"Name: {someone.name}\n" + "\n".join(f"{row[0]}: {row[1]}" for row in someone.rows)
    request = w.ask("Turn this text into notes:", "Write this as short notes:", "Make a list of the facts:")
    return [(f"{request} {someone.passage}", text)], {"expected": "=" + text}


def contrast(w: Writer) -> Answer:
    """Two people side by side."""
    one = Person(w, w.ask(3, 4, 5))
    two = Person(w, len(one.rows), one.kept)
    lines, found = [], []
    for row, other_row in zip(one.rows, two.rows, strict=True):
        other = other_row[1]
        form = {
            "Age": ("{a} is {x} years old, {but} {b} is {y}.",),
            "Town": ("{a} lives in {x}, {but} {b} lives in {y}.",),
            "Job": ("{a} works as a {x}, {but} {b} works as a {y}.",),
            "Pet": ("{a} has a {x}, {but} {b} has a {y}.",),
            "Colour": ("{a} likes {x}, {but} {b} likes {y}.",),
            "Hobby": ("{a} enjoys {x}, {but} {b} enjoys {y}.",),
        }[row[0]][0]
        lines.append(form.format(a=one.name, b=two.name, x=row[1], y=other, but=w.say("but", "while")))
        found += [row[1], other]
    request = w.ask("Compare these two people:", "How are these two different?", "Compare them:")
    return [(f"{request} {one.passage} {two.passage}", " ".join(lines))], facts(found)


def shop(w: Writer) -> Answer:
    name, town, opens, closes = f"{w.name()}'s Shop", w.town(), w.clock(), w.clock()
    first, second = w.one(words.GOODS), w.one(words.GOODS)
    price, other = w.number(2, 60), w.number(2, 60)
    passage = w.ask(
        f"{name} in {town} opens at {opens} and closes at {closes}. "
        f"It sells {first} for {price} dollars and {second} for {other} dollars.",
        f"In {town} there is {name}. It is open from {opens} to {closes}. "
        f"You can buy {first} for {price} dollars and {second} for {other} dollars there.",
    )
    questions: list[Question] = [
        (w.ask(f"When does {name} open?", f"At what time does {name} open?"), f"{name} opens at {opens}.", opens),
        (w.ask(f"When does {name} close?", f"At what time does {name} close?"), f"{name} closes at {closes}.", closes),
        (
            w.ask(f"What does {name} sell?", "What can you buy there?"),
            f"{name} sells {first} and {second}.",
            f"{first} and {second}",
        ),
        (
            w.ask(f"What is the price of {first}?", f"What does {first} cost there?"),
            f"The price of {first} is {price} dollars.",
            f" {price} ",
        ),
        (
            w.ask(f"What is the price of {second}?", f"What does {second} cost there?"),
            f"The price of {second} is {other} dollars.",
            f" {other} ",
        ),
        (w.ask(f"Where is {name}?", f"In which town is {name}?"), f"{name} is in {town}.", town),
    ]
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
        said = "\n".join(
            w.say(
                f"The train to {t} leaves at {h} from platform {p}.",
                f"At {h} the train to {t} leaves from platform {p}.",
            )
            for t, h, p in rows
        )
        return [(f"{request}\n{table}", said)], {
            "expected": rows[0][0],
            "facts": [f"platform {p}" for _, _, p in rows],
            "also": [x for t, h, _ in rows for x in (t, h)],
        }
    questions: list[Question] = []
    for t, h, p in rows:
        questions += [
            (
                w.ask(f"When does the train to {t} leave?", f"What time is the train to {t}?"),
                f"The train to {t} leaves at {h}.",
                h,
            ),
            (
                w.ask(f"Which platform is for {t}?", f"From which platform does the train to {t} leave?"),
                f"The train to {t} leaves from platform {p}.",
                f"platform {p}.",
            ),
        ]
    return conversation(w, table, questions)


FAMILIES: list[Family] = [person, two_people, profile, notes, contrast, shop, trains]
