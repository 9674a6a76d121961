//! Documents at work: procedures, mails, settings of programs, minutes and fault reports.

use super::super::values::{CITIES, Value};
use super::{DocumentKind, Layout, fact, number};

const ANIMALS: [&str; 20] = [
    "otter", "heron", "badger", "lynx", "magpie", "beaver", "falcon", "hedgehog", "marten", "stork",
    "weasel", "raven", "salmon", "viper", "bison", "cricket", "osprey", "turtle", "hamster", "pelican",
];

pub(super) const PROCEDURE: DocumentKind = DocumentKind {
    name: "procedure",
    nouns: [
        "pump restart",
        "filter change",
        "boiler check",
        "tape backup",
        "lift test",
        "freezer cleaning",
        "alarm test",
        "valve inspection",
    ],
    openings: ["Procedure: {subject}", "{subject}, step by step", "How to do the {subject}"],
    ends: ["", "Sign the sheet at the door when you have finished."],
    layout: Layout::List,
    facts: [
        fact(
            Value::Time,
            "At what time does the {subject} begin?",
            [
                "Begin at {value}, never earlier.",
                "The work begins at {value}.",
                "The {subject} begins at {value}.",
            ],
        ),
        fact(
            Value::Part,
            "Which seal does the {subject} need? Give its part number.",
            [
                "Have a seal of type {value} at hand.",
                "Use the seal {value} and no other.",
                "Fit a new seal, {value}.",
            ],
        ),
        fact(
            Value::Person,
            "To whom must the result of the {subject} be reported?",
            [
                "Report the result to {value}.",
                "Call {value} and report the result.",
                "{value} must hear the result.",
            ],
        ),
        number(
            (110, 890),
            "What pressure, in kilopascals, must be set in the {subject}?",
            [
                "Set the pressure to {value} kilopascals.",
                "The right pressure is {value} kilopascals.",
                "Turn the wheel until the gauge shows a pressure of {value} kilopascals.",
            ],
            ["needs the higher pressure", "needs the lower pressure"],
        ),
        number(
            (32, 290),
            "How many minutes must you wait in the {subject}?",
            [
                "Wait {value} minutes before you open the cover.",
                "Then let everything rest for {value} minutes.",
                "After that, wait for {value} minutes.",
            ],
            ["has the longer wait", "has the shorter wait"],
        ),
    ],
    fillers: [
        "Wear gloves and goggles during the whole of this work.",
        "Keep the doors closed so that no dust gets in.",
        "Make sure that no tools are left inside.",
        "Wipe the floor if any water has been spilled.",
        "If a red lamp turns on, stop and ask for help.",
        "Read the whole list before you touch anything.",
        "Two people are needed, one of whom holds the ladder.",
        "Put the old parts into the box for scrap metal.",
    ],
    more: [
        "If the {which} lamp blinks, write {count} into the log and go on.",
        "The key of the {which} cabinet is with {person} until {time}.",
        "The {which} cable was replaced on {date} and carries the mark {count}.",
        "Do not touch the {which} handle, which {person} adjusted on {date}.",
        "The {which} meter must show less than {count}; if it does not, call {person}.",
        "A drawing of the {which} pipe hangs in room {count}, signed by {person}.",
    ],
    related: (
        "The {other} must be finished before this work.",
        "work that must be finished before the {subject}",
    ),
};

pub(super) const MAIL: DocumentKind = DocumentKind {
    name: "mail",
    nouns: [
        "budget review",
        "spring fair",
        "office move",
        "sales plan",
        "staff survey",
        "harbour tour",
        "book launch",
        "charity run",
    ],
    openings: [
        "Subject: {subject}\n\nDear all,",
        "Subject: Re: {subject}\n\nHello everyone,",
        "Mail to the whole team, subject: {subject}\n\nGood morning,",
    ],
    ends: ["Best regards", "Thank you all, and see you soon"],
    layout: Layout::Prose,
    facts: [
        fact(
            Value::Time,
            "At what time is the meeting about the {subject}?",
            ["We meet at {value}.", "The meeting is at {value}.", "Our meeting on this starts at {value}."],
        ),
        fact(
            Value::Date,
            "On which day are the proposals for the {subject} due?",
            [
                "All proposals are due on {value}.",
                "Please hand in your proposals by {value}.",
                "The deadline for proposals is {value}.",
            ],
        ),
        fact(
            Value::Person,
            "Who collects the comments on the {subject}?",
            [
                "{value} collects your comments.",
                "Please send all comments to {value}.",
                "Your comments go to {value}, as before.",
            ],
        ),
        number(
            (1010, 9900),
            "How many crowns may be spent on the {subject}?",
            [
                "We may spend {value} crowns.",
                "Our limit is {value} crowns.",
                "The board has approved {value} crowns for the {subject}.",
            ],
            ["has the larger budget", "has the smaller budget"],
        ),
        fact(
            Value::Count(101, 990),
            "In which room is the meeting about the {subject}?",
            [
                "I have booked room {value}.",
                "You will find us in room {value}.",
                "This time we are in room {value}.",
            ],
        ),
    ],
    fillers: [
        "Coffee and sandwiches will be there as usual.",
        "I am sorry that this comes at such short notice.",
        "The slides of last time are in the shared folder.",
        "If you cannot come, please tell me beforehand.",
        "Let us keep it short so that nobody misses a train.",
        "I would like to hear from those who were quiet so far.",
        "Please bring your own laptop and a charger.",
        "The printer on our floor is still broken, by the way.",
    ],
    more: [
        "{person} has offered to bring the {which} projector and {count} handouts.",
        "The {which} entrance is closed after {time}, so ring the bell.",
        "On {date}, {person} will be on holiday, and nobody reads that mailbox.",
        "There were {count} answers to the {which} form, as {person} told me.",
        "The {which} car park costs {count} cents per hour until {time}.",
        "A copy of the {which} list has been with {person} since {date}.",
    ],
    related: (
        "You know most of this from my mail about the {other}.",
        "event that is the subject of the other mail mentioned in the mail about the {subject}",
    ),
};

pub(super) const SETTINGS: DocumentKind = DocumentKind {
    name: "settings",
    nouns: [
        "export service",
        "import service",
        "mail service",
        "search service",
        "login service",
        "billing service",
        "backup service",
        "report service",
    ],
    openings: [
        "# Settings of the {subject}\nimport os, json, time",
        "\"\"\"The {subject}.\"\"\"\nfrom common import Service, log",
        "# config.py of the {subject}\nimport logging",
    ],
    ends: ["", "# End of the file"],
    layout: Layout::Lines,
    facts: [
        fact(
            Value::Count(1010, 9900),
            "On which port does the {subject} listen?",
            [
                "PORT = {value}",
                "server.listen(port={value})",
                "LISTEN_PORT = {value}  # the port for clients",
            ],
        ),
        number(
            (101, 990),
            "After how many seconds does a request to the {subject} time out?",
            [
                "TIMEOUT_SECONDS = {value}",
                "client.timeout = {value}  # seconds",
                "REQUEST_TIMEOUT = {value}  # in seconds",
            ],
            ["has the longer timeout", "has the shorter timeout"],
        ),
        number(
            (101, 9900),
            "How many rows are in a batch of the {subject}?",
            [
                "BATCH_ROWS = {value}",
                "batches = split(rows, size={value})  # rows per batch",
                "ROWS_PER_BATCH = {value}",
            ],
            ["has the larger batches", "has the smaller batches"],
        ),
        fact(
            Value::Person,
            "Who is the owner of the {subject}?",
            ["OWNER = \"{value}\"", "# Owner: {value}", "__owner__ = \"{value}\""],
        ),
        fact(
            Value::Word(&ANIMALS),
            "What is the name of the queue that the {subject} reads?",
            [
                "QUEUE = \"{value}\"",
                "queue = connect(name=\"{value}\")",
                "QUEUE_NAME = \"{value}\"  # read by the worker",
            ],
        ),
    ],
    fillers: [
        "# Ask the team before you change any of the values in this file.",
        "# All values are read once, when the service starts.",
        "def close(self): self.socket.close() if self.socket else None",
        "if not ready(): raise RuntimeError(\"the service is not ready\")",
        "while not stopped: time.sleep(interval)  # wait for the next message",
        "for row in rows: queue.put(row)  # blocks if the queue is full",
        "log.info(\"started, and waiting for the first message\")",
        "assert os.path.exists(folder), \"create the folder before the start\"",
    ],
    more: [
        "# {date}: {person} moved the {which} table and fixed {count} warnings.",
        "{which}_limit = min({which}_limit, {count})  # agreed with {person}",
        "schedule(task=\"{which} cleanup\", at=\"{time}\")  # see note {count}",
        "# The {which} cache holds {count} entries; {person} measured it.",
        "retry(\"{which}\", pause={count})  # milliseconds, tuned on {date}",
        "assert len({which}_rows) < {count}, \"too many {which} rows, ask {person}\"",
    ],
    related: (
        "wait_for(\"{other}\")  # the service that must start before this one",
        "service that must start before the {subject}",
    ),
};

pub(super) const MINUTES: DocumentKind = DocumentKind {
    name: "minutes",
    nouns: [
        "garden club",
        "choir",
        "rowing club",
        "school board",
        "chess circle",
        "film society",
        "harbour council",
        "reading group",
    ],
    openings: [
        "Minutes of the {subject}",
        "{subject}: what was said and decided",
        "Meeting of the {subject}, minutes",
    ],
    ends: ["", "The chair closed the meeting and thanked everybody."],
    layout: Layout::Prose,
    facts: [
        fact(
            Value::Date,
            "When is the next meeting of the {subject}?",
            [
                "The next meeting is on {value}.",
                "We meet again on {value}.",
                "{value} was chosen for the next meeting.",
            ],
        ),
        number(
            (1010, 9900),
            "How many crowns are in the account of the {subject}?",
            [
                "The treasurer reported {value} crowns in the account.",
                "There are {value} crowns in the account.",
                "The account of the {subject} stands at {value} crowns.",
            ],
            ["has more money", "has less money"],
        ),
        number(
            (32, 990),
            "How many members of the {subject} have paid their fee?",
            [
                "So far, {value} members have paid their fee.",
                "The fee has been paid by {value} members.",
                "Of all members, {value} have paid the fee.",
            ],
            ["has more paying members", "has fewer paying members"],
        ),
        fact(
            Value::Person,
            "Who of the {subject} will write to the town hall?",
            [
                "{value} will write to the town hall.",
                "The letter to the town hall will be written by {value}.",
                "It was agreed that {value} writes to the town hall.",
            ],
        ),
        fact(
            Value::Word(&CITIES),
            "Where does the summer trip of the {subject} go?",
            [
                "The summer trip goes to {value}.",
                "This summer we travel to {value}.",
                "{value} won the vote on the summer trip.",
            ],
        ),
    ],
    fillers: [
        "The minutes of the last meeting were approved.",
        "The heating in the hall is still too weak, as several people noted.",
        "Nobody objected to the new colour of the posters.",
        "There was a long talk about the old piano.",
        "Two new members were welcomed with applause.",
        "The cakes were praised, and the recipe was asked for.",
        "The question of parking was put off once more.",
        "Keys must be given back at the end of the season.",
    ],
    more: [
        "{person} showed {count} pictures of the {which} room and was thanked.",
        "The {which} cupboard was opened at {time} and was found empty.",
        "A bill of {count} cents for the {which} window, sent on {date}, was paid.",
        "{person} asked for {count} more chairs in the {which} hall.",
        "On {date}, the {which} door was left open, as {person} complained.",
        "The {which} notice board gets {count} new pins, which {person} will buy.",
    ],
    related: (
        "A joint evening with the {other} is planned.",
        "association that plans a joint evening with the {subject}",
    ),
};

pub(super) const FAULT: DocumentKind = DocumentKind {
    name: "fault",
    nouns: [
        "printer fault",
        "network fault",
        "door fault",
        "scanner fault",
        "display fault",
        "payment fault",
        "battery fault",
        "heating fault",
    ],
    openings: ["Fault report: {subject}", "Ticket: {subject}", "{subject}, state of the ticket"],
    ends: ["", "This ticket is still open."],
    layout: Layout::List,
    facts: [
        fact(
            Value::Time,
            "At what time was the {subject} first seen?",
            [
                "First seen at {value}.",
                "It was first seen at {value}.",
                "A user first saw the {subject} at {value}.",
            ],
        ),
        fact(
            Value::Person,
            "Who works on the {subject}?",
            ["{value} works on it.", "Assigned to {value}.", "The ticket is with {value}, who works on it."],
        ),
        fact(
            Value::Part,
            "Which device has the {subject}? Give its tag.",
            [
                "Tag of the device: {value}.",
                "The device with the tag {value} has it.",
                "The device bears the tag {value}.",
            ],
        ),
        number(
            (32, 990),
            "How many users does the {subject} affect?",
            ["Affected users: {value}.", "It affects {value} users.", "So far, {value} users are affected."],
            ["affects more users", "affects fewer users"],
        ),
        fact(
            Value::Date,
            "By which day should the {subject} be mended?",
            [
                "It should be mended by {value}.",
                "To be mended by {value}.",
                "The repair must be done by {value}.",
            ],
        ),
    ],
    fillers: [
        "Turning it off and on again did not help.",
        "The cable was changed, without any effect.",
        "The log contains nothing unusual.",
        "It happens more often in the afternoon.",
        "The maker has been told and wants to see a photo.",
        "There was the same trouble before the last update.",
        "Until then, please use the device on the next floor.",
        "A few users have asked for news several times.",
    ],
    more: [
        "{person} measured {count} millivolts at the {which} contact.",
        "The {which} light was on until {time} and then went out.",
        "A note by {person} of {date} says that the {which} cover was loose.",
        "Error {count} was shown on the {which} screen.",
        "The {which} socket was checked {count} times on {date}.",
        "{person} has a photo of the {which} side, taken at {time}.",
    ],
    related: ("The {other} has the same cause.", "fault that has the same cause as the {subject}"),
};
