//! Documents at home: product pages, recipes and travel notes.

use super::super::values::{CITIES, Value};
use super::{DocumentKind, Layout, fact, number};

const MATERIALS: [&str; 20] = [
    "beech",
    "copper",
    "linen",
    "oak",
    "brass",
    "porcelain",
    "walnut",
    "tin",
    "cork",
    "bamboo",
    "granite",
    "leather",
    "felt",
    "nickel",
    "maple",
    "marble",
    "nylon",
    "ash",
    "cotton",
    "slate",
];
const SPICES: [&str; 20] = [
    "saffron", "caraway", "thyme", "nutmeg", "sumac", "cumin", "tarragon", "cloves", "fennel", "paprika",
    "sage", "anise", "turmeric", "dill", "mustard", "ginger", "juniper", "mint", "rosemary", "cinnamon",
];

pub(super) const PRODUCT: DocumentKind = DocumentKind {
    name: "product",
    nouns: ["kettle", "desk lamp", "ladder", "drill", "tent", "radio", "toaster", "suitcase"],
    openings: ["{subject}", "Product page: {subject}", "New in our shop: the {subject}"],
    ends: ["", "Add it to your basket today."],
    layout: Layout::Lines,
    facts: [
        number(
            (32, 990),
            "How many crowns does the {subject} cost?",
            ["Price: {value} crowns.", "It costs {value} crowns.", "You pay {value} crowns, tax included."],
            ["costs more", "costs less"],
        ),
        number(
            (1010, 9900),
            "How many grams does the {subject} weigh?",
            ["Weight: {value} grams.", "It weighs {value} grams.", "At {value} grams, it is easy to carry."],
            ["is heavier", "is lighter"],
        ),
        fact(
            Value::Part,
            "What is the order number of the {subject}?",
            ["Order number: {value}.", "Order it as {value}.", "In the catalogue it has the number {value}."],
        ),
        fact(
            Value::Word(&MATERIALS),
            "From which material is the grip of the {subject} made?",
            [
                "The grip is made of {value}.",
                "It has a grip of {value}.",
                "Its {value} grip lies well in the hand.",
            ],
        ),
        fact(
            Value::Word(&CITIES),
            "In which town is the {subject} assembled?",
            ["Assembled in {value}.", "We assemble it in {value}.", "The {subject} is assembled in {value}."],
        ),
    ],
    fillers: [
        "Delivery takes a few working days and is free.",
        "Customers praise how quiet and robust it is.",
        "The box contains a manual in several languages.",
        "You can send it back within a month, no questions asked.",
        "It fits into any bag and is simple to clean.",
        "All parts that wear out can be replaced at home.",
        "It comes in several colours, all of them matt.",
        "A short film shows how it is put together.",
    ],
    more: [
        "{person} wrote on {date}: the {which} edge could be smoother, but I like it.",
        "The {which} screw is {count} tenths of a millimetre long.",
        "Our shop in the {which} street is open until {time} and has {count} of them in stock.",
        "The {which} cover was tested {count} times by {person}.",
        "In the test of {date}, the {which} hinge was bent {count} times.",
        "A {which} spare cover can be bought for {count} cents.",
    ],
    related: (
        "Most customers buy it together with the {other}.",
        "product that most customers buy together with the {subject}",
    ),
};

pub(super) const RECIPE: DocumentKind = DocumentKind {
    name: "recipe",
    nouns: ["pie", "bread", "cake", "pudding", "gratin", "tart", "casserole", "flan"],
    openings: ["{subject}", "Recipe: {subject}", "How to bake a {subject}"],
    ends: ["", "Enjoy your meal!"],
    layout: Layout::Prose,
    facts: [
        fact(
            Value::Count(110, 290),
            "At how many degrees is the {subject} baked?",
            [
                "Bake it at {value} degrees.",
                "Heat the oven to {value} degrees.",
                "The oven must have {value} degrees.",
            ],
        ),
        number(
            (32, 290),
            "For how many minutes is the {subject} baked?",
            [
                "It is baked for {value} minutes.",
                "Leave it in the oven for {value} minutes.",
                "After {value} minutes in the oven it is done.",
            ],
            ["is baked longer", "is baked for a shorter time"],
        ),
        number(
            (101, 990),
            "How many grams of flour does the {subject} need?",
            [
                "You need {value} grams of flour.",
                "Take {value} grams of flour.",
                "Sift {value} grams of flour into a bowl.",
            ],
            ["needs more flour", "needs less flour"],
        ),
        fact(
            Value::Word(&SPICES),
            "Which spice gives the {subject} its taste?",
            [
                "It gets its taste from {value}.",
                "Season it with plenty of {value}.",
                "The spice that matters here is {value}.",
            ],
        ),
        fact(
            Value::Person,
            "From whom does the recipe of the {subject} come?",
            [
                "The recipe comes from {value}.",
                "I was given this recipe by {value}.",
                "We owe the recipe of the {subject} to {value}.",
            ],
        ),
    ],
    fillers: [
        "Butter the form well, the corners too.",
        "Stir slowly with a wooden spoon until it is smooth.",
        "Taste it before you add any more salt.",
        "It is even better on the next day.",
        "Cover it with a cloth and keep it away from draughts.",
        "Children like it with a little honey.",
        "If the top gets too dark, lay some paper over it.",
        "Let it cool down before you cut it.",
    ],
    more: [
        "{person} likes to eat the {which} part first and once paid {count} cents for a slice.",
        "On {date} we had {count} guests, and the {which} tray was empty by {time}.",
        "The {which} bowl holds {count} millilitres and was a gift from {person}.",
        "Put the {which} tin aside until {time}; it can be used for the next day.",
        "A neighbour, {person}, cuts it into {count} cubes with the {which} knife.",
        "In the {which} market, {person} sells eggs at {count} cents for a dozen.",
    ],
    related: ("It is best served after the {other}.", "dish after which the {subject} is best served"),
};

pub(super) const TRAVEL: DocumentKind = DocumentKind {
    name: "travel",
    nouns: ["castle", "lighthouse", "waterfall", "monastery", "cave", "tower", "mill", "fortress"],
    openings: ["A day at the {subject}", "Travel notes: {subject}", "Why the {subject} is worth a visit"],
    ends: ["", "I will certainly go there again."],
    layout: Layout::Prose,
    facts: [
        fact(
            Value::Time,
            "When does the first bus to the {subject} leave?",
            [
                "The first bus leaves at {value}.",
                "Take the first bus, which leaves at {value}.",
                "At {value}, the first bus sets off.",
            ],
        ),
        number(
            (32, 290),
            "How many crowns does a ticket for the {subject} cost?",
            [
                "A ticket costs {value} crowns.",
                "I paid {value} crowns for a ticket.",
                "You need a ticket, for {value} crowns.",
            ],
            ["has the more expensive ticket", "has the cheaper ticket"],
        ),
        number(
            (310, 2900),
            "How many metres above the sea is the {subject}?",
            [
                "It lies {value} metres above the sea.",
                "You are {value} metres above the sea there.",
                "The {subject} is {value} metres above the sea.",
            ],
            ["lies higher above the sea", "lies lower above the sea"],
        ),
        fact(
            Value::Person,
            "Who guides visitors through the {subject}?",
            [
                "Our guide was {value}.",
                "{value} guides visitors through it.",
                "Visitors are guided by {value}, who knows everything.",
            ],
        ),
        fact(
            Value::Word(&CITIES),
            "Which town is closest to the {subject}?",
            [
                "The closest town is {value}.",
                "It is closest to the town of {value}.",
                "From {value}, the closest town, one can walk.",
            ],
        ),
    ],
    fillers: [
        "The path is steep, and good shoes are a must.",
        "In the morning, fog hides the whole valley.",
        "A small kiosk sells lemonade and postcards.",
        "We met hardly anybody except for a few goats.",
        "From the top one can see as far as the coast.",
        "Dogs are allowed if they are on a lead.",
        "The walls are damp, so bring a warm coat.",
        "Those who like silence should come in winter.",
    ],
    more: [
        "The {which} stairs have {count} steps, which {person} counted twice.",
        "A stone in the {which} wall carries the date {date} and the name {person}.",
        "The {which} gate is locked at {time}, as a sign says.",
        "In the {which} chapel hang {count} small pictures by {person}.",
        "On {date}, a fire in the {which} wing destroyed {count} books.",
        "The {which} inn has {count} old plates and serves soup until {time}.",
    ],
    related: (
        "Nearly all visitors go on to the {other} afterwards.",
        "sight to which nearly all visitors of the {subject} go afterwards",
    ),
};
