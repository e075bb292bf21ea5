"""What is written: messages of about one kilobyte and records of about 84 bytes, the same for every rival.

Owns the texts. Everything comes from a seeded generator, so that two runs write the same bytes. The realistic text is
put together from word lists and sentence patterns with names, numbers, identifiers and pieces of tool output in it; a
general compressor shrinks it about as much as real agent conversations (`zstd_ratio` says how much, and the report
prints it), which text made of a few repeated sentences would not.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import msgspec
import zstandard

MESSAGE_BYTES = 1_000
RECORD_BYTES = 84
ZSTD_SAMPLE_BYTES = 32 * 1024
"""The material's compressibility is measured over pieces of this size, about what one stored node holds."""


def _words(text: str) -> list[str]:
    return text.split()


_NOUNS = _words("""
account address agent agreement airport amount analysis answer approach archive argument arrival article
attempt author average balance batch behaviour bill block board booking border branch breakfast bridge budget buffer
building cabin cache calendar candidate capacity carrier cause chapter charge choice city claim client clock code
column comment company comparison component condition conference connection contract copy corner cost country course
customer database deadline decision default delay delivery department deposit description design detail device
difference direction discount distance district document driver edition effect effort email employee engine entry
error estimate event evidence example exchange exception expense experience explanation export extension failure
feature fee ferry field figure file filter flight folder forecast format frame function garden gate goal grant graph
group guest guide harbour heading history holiday hotel hour house idea image impact import increase index industry
input inquiry insurance interest interface interval invoice issue item itinerary journey kitchen language latency
lawyer layer layout letter level library limit line link list listing loan location lock log luggage machine manager
manual map margin market meaning measure meeting member memory menu message method metric migration minute mistake
model module moment month museum name network note notice number object offer office operation opinion option order
origin outcome output owner package page paper parameter parking part partner passage passenger path patient pattern
payment percentage period permission person phone picture place plan platform policy port position postcode
preference premium price principle printer priority problem process product profile programme progress project
promise proof property proposal protocol provider quality quantity query question queue quote railway range rate
reader reason receipt recipe record reference refund region registry relation release reminder rent repair report
request reservation resource response restaurant result return revenue review risk road role room route row rule
sample schedule schema scope score screen search season seat section sentence sequence series server service session
setting shape share shipment shop shuttle signal site size sketch solution source space speed staff stage standard
state station status step stock storage store story strategy stream street student study style subject suburb
suggestion summary supplier support surface survey symbol system table target task tax team template tenant term test
text theory thread ticket timeout title token tool topic total tower town track trade traffic train transfer travel
treatment tree trend trial trip tunnel type update upgrade user vacancy value variable vehicle vendor version view
village visa visit volume voucher waiter walk warehouse warning water weather website week weekend window winter word
worker workflow workshop yard zone
""")
_VERBS = _words("""
accept add adjust allow apply approve arrange ask assign avoid begin book borrow break bring build buy
calculate call cancel capture carry change check choose clear close collect combine compare complete confirm connect
consider contain continue convert correct count cover create cut decide decrease define delay delete deliver depend
describe detect divide draw drop edit enable end ensure enter estimate examine exceed expand expect explain explore
extend fail fetch fill find finish fix follow forward gather give grow guess handle happen help hold ignore improve
include increase inspect install introduce invite join keep label launch lead learn leave limit load lose lower
maintain make manage mark match measure mention merge move need notice obtain offer omit open order pack parse pass
pay pick plan point prefer prepare present prevent print produce propose protect prove provide publish pull push
raise reach read receive recommend record reduce refer refuse reject release remain remember remove rename repair
repeat replace reply report request require reserve resolve restore return reuse review run save scan schedule
search select send separate serve share shift show sign skip solve sort split start stay store submit suggest supply
support suppose switch take test track transfer translate travel trust try turn update upload use verify visit wait
warn watch work write
""")
_ADJECTIVES = _words("""
able active additional annual available basic best better big brief broad busy careful central
certain cheap clean clear close cold common complete correct current daily dark deep default different difficult
direct early easy empty exact expensive extra fair familiar fast final fine firm flat flexible formal free fresh
full general good great happy hard heavy helpful high important incomplete initial internal large late legal likely
little local long loose low main major manual minor missing modern narrow natural nearby necessary new normal obvious
old open original overall partial past personal plain polite popular possible present previous private probable
proper public quick quiet rare ready real recent regular related reliable remote rough safe separate serious sharp
short similar simple single slow small soft special stable standard strange strict strong sufficient suitable sure
temporary thin tight tiny total true typical unclear unique unusual upper useful usual valid various weak whole wide
wrong young
""")
_NAMES = _words("""
Amina Andrei Beatriz Bruno Camila Chidi Clara Daniel Dorota Elena Emeka Farid Fatima Greta Hana Hugo Ines
Ivan Jonas Julia Kaito Karim Lara Leila Lucas Magda Marco Mei Milan Nadia Nils Noor Olga Omar Paula Pedro Priya Rafael
Rosa Samir Sofia Sven Tariq Tomas Uma Vera Victor Wei Yara Yusuf Zoe
""")
_PLACES = _words("""
Lisbon Porto Madrid Seville Bilbao Lyon Nantes Ghent Antwerp Utrecht Bremen Leipzig Graz Brno Gdansk Riga
Tartu Turku Malmo Aarhus Bergen Cork Leeds Bristol Cardiff Turin Genoa Bari Split Zadar Varna Patras Izmir Haifa Cairo
Tunis Fez Dakar Accra Nairobi Kigali Durban Pune Kochi Hanoi Osaka Busan Cebu Perth Lima Quito Bogota Austin
""")
_LINKS = _words("""
and but because although so while when if since before after unless until whereas however therefore
meanwhile instead moreover otherwise
""")
_FRAMES = (
    "the {a} {n} of the {n2} will {v} the {n3}",
    "{name} wants to {v} a {a} {n} before the {n2}",
    "please {v} every {n} that the {n2} does not {v2}",
    "I could not {v} the {n}, {l} its {n2} is {a}",
    "we should {v} {num} {n}s and {v2} the {a} {n2}",
    "in {place} the {n} is {a}, {l} you can {v} it on {day}",
    "there are {num} {a} {n}s near the {n2} in {place}",
    "it may {v} the {n} {l} the {n2} has to {v2} again",
    "what did {name} {v} about the {a} {n}",
    "according to the {n} from {name}, {num} percent of {n2}s {v} a {n3}",
    "your {n} {ident} was {a}; I will {v} it {l} {v2} the {n2}",
    "that {n} costs {num}.{cents} euro, {l} the {a} one has no {n2}",
    "a {a} {n} cannot {v} more than {num} {n2}s",
    "let me {v} the {n} first and then {v2} what the {n2} says about {place}",
)
_TOOL = '{{"{n}_id": "{ident}", "{n2}": {num}, "status": "{a}", "city": "{place}", "price": {num}.{cents}}}'
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_ROLES = ("user", "assistant", "assistant", "tool")


def _fill(pattern: str, rng: random.Random) -> str:
    return pattern.format(
        n=rng.choice(_NOUNS),
        n2=rng.choice(_NOUNS),
        n3=rng.choice(_NOUNS),
        v=rng.choice(_VERBS),
        v2=rng.choice(_VERBS),
        a=rng.choice(_ADJECTIVES),
        l=rng.choice(_LINKS),
        name=rng.choice(_NAMES),
        place=rng.choice(_PLACES),
        day=rng.choice(_DAYS),
        num=rng.randrange(2, 980),
        cents=rng.randrange(10, 99),
        ident=f"{rng.getrandbits(48):012x}",
    )


def sentence(rng: random.Random) -> str:
    text = _fill(rng.choice(_FRAMES), rng)
    return text[0].upper() + text[1:] + rng.choice("....?!")


def realistic(rng: random.Random) -> Iterator[dict[str, Any]]:
    """A conversation: users, an assistant, and a tool that answers in JSON."""
    # Long runs need many sentences and the time belongs to the rivals, so messages draw from a large stock of them.
    # It is far larger than any window in which a compressor could see one twice.
    stock = [sentence(rng) for _ in range(60_000)]
    tools = [_fill(_TOOL, rng) for _ in range(12_000)]
    while True:
        role = rng.choice(_ROLES)
        source, joint = (tools, ",\n ") if role == "tool" else (stock, " ")
        parts: list[str] = []
        size = 0
        while size < MESSAGE_BYTES - 110:
            part = rng.choice(source)
            parts.append(part)
            size += len(part) + len(joint)
        text = joint.join(parts)
        yield {
            "role": role,
            "id": f"msg_{rng.getrandbits(64):016x}",
            "content": f"[{text}]" if role == "tool" else text,
            "tokens": len(text) // 4,
        }


def incompressible(rng: random.Random) -> Iterator[dict[str, Any]]:
    """The worst case for storage: content that no compressor can shrink, so it is random bytes and not letters."""
    while True:
        yield {
            "role": rng.choice(_ROLES),
            "id": f"msg_{rng.getrandbits(64):016x}",
            "content": rng.randbytes(MESSAGE_BYTES - 60),
            "tokens": rng.randrange(2_000),
        }


def records(count: int, rng: random.Random) -> list[dict[str, Any]]:
    """A table of small records, about RECORD_BYTES each, that edits are scattered over."""
    return [
        {
            "id": at,
            "name": f"{rng.choice(_NAMES)} {rng.choice(_ADJECTIVES)} {rng.choice(_NOUNS)}",
            "place": rng.choice(_PLACES),
            "done": rng.random() < 0.5,
            "score": rng.random(),
            "note": rng.choice(_VERBS) + " " + rng.choice(_NOUNS),
        }
        for at in range(count)
    ]


def encoded_bytes(value: Any) -> int:
    """Logical size: one MessagePack encoding, without anything around it."""
    return len(msgspec.msgpack.encode(value))


def zstd_ratio(messages: list[dict[str, Any]]) -> float:
    """How many times smaller zstd at level 1 makes the material, in pieces of ZSTD_SAMPLE_BYTES."""
    data = b"".join(map(msgspec.msgpack.encode, messages))
    compress = zstandard.ZstdCompressor(level=1).compress
    pieces = [data[at : at + ZSTD_SAMPLE_BYTES] for at in range(0, len(data), ZSTD_SAMPLE_BYTES)]
    return len(data) / sum(len(compress(piece)) for piece in pieces)
