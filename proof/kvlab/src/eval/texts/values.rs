//! Values of facts: names, dates, numbers. The values of all documents in a prompt differ.

use std::collections::HashSet;

use rand::RngExt;
use rand::rngs::StdRng;
use rand::seq::{IndexedRandom, SliceRandom};

use crate::eval::Grader;

pub(super) const STEMS: [&str; 24] = [
    "Nor", "Hel", "Cald", "Bren", "Vost", "Tam", "Ald", "Quill", "Fen", "Mar", "Thorn", "Wex", "Dray", "Lun",
    "Ost", "Pell", "Sev", "Garr", "Ing", "Kest", "Rul", "Yar", "Zem", "Hask",
];
pub(super) const ENDINGS: [&str; 12] =
    ["vane", "brook", "well", "mark", "ford", "dale", "stead", "worth", "mere", "ley", "ridge", "more"];
pub(super) const CITIES: [&str; 20] = [
    "Port Vell",
    "Aldermoor",
    "Kesterby",
    "Santa Rima",
    "Lowen",
    "Grauburg",
    "Oldhaven",
    "Miravale",
    "Tarn Head",
    "Sollum",
    "Brackwater",
    "Vintry",
    "Eastmere",
    "Dunholt",
    "Pellegrino Bay",
    "Oskby",
    "Rillton",
    "Cape Hallow",
    "Marsden Cross",
    "Ythan",
];
pub(super) const FIRST: [&str; 16] = [
    "Marta", "Ivo", "Selma", "Anton", "Greta", "Pavel", "Nadia", "Oscar", "Livia", "Hugo", "Elsa", "Boris",
    "Clara", "Emil", "Rosa", "Victor",
];
pub(super) const LAST: [&str; 16] = [
    "Lindqvist",
    "Okafor",
    "Barros",
    "Hartmann",
    "Novak",
    "Petrov",
    "Singh",
    "Moreau",
    "Tanaka",
    "Fischer",
    "Costa",
    "Duval",
    "Keller",
    "Adeyemi",
    "Santos",
    "Weiss",
];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
/// Things that sentences in longer documents mention.
const THINGS: [&str; 20] = [
    "north", "south", "east", "west", "upper", "lower", "inner", "outer", "old", "new", "spare", "main",
    "green", "yellow", "white", "small", "wide", "narrow", "front", "rear",
];

/// A kind of value. Numbers start above 31, so that no number is part of a date.
#[derive(Debug, Clone, Copy)]
pub(super) enum Value {
    /// A time of day, for example `14:35`.
    Time,
    /// A day, for example `14 March`.
    Date,
    /// A first and a last name.
    Person,
    /// A part number, for example `BX-4471`.
    Part,
    /// A number between two limits, which are far enough apart for all facts in a prompt.
    Count(u32, u32),
    /// One of these words. There is one for each document in a prompt.
    Word(&'static [&'static str; 20]),
}

impl Value {
    /// Returns the rule that decides whether an answer contains the value.
    pub(super) fn grader(self) -> Grader {
        match self {
            Self::Count(..) => Grader::Numbers,
            _ => Grader::Contains,
        }
    }

    fn draw(self, rng: &mut StdRng) -> String {
        let mut letter = || char::from(b'A' + rng.random_range(0..26));
        match self {
            Self::Part => format!("{}{}-{}", letter(), letter(), rng.random_range(1000..10000)),
            Self::Time => format!("{:02}:{:02}", rng.random_range(7..20), 5 * rng.random_range(0..12)),
            Self::Date => format!("{} {}", rng.random_range(1..29), pick(&MONTHS, rng)),
            Self::Person => format!("{} {}", pick(&FIRST, rng), pick(&LAST, rng)),
            Self::Count(least, most) => rng.random_range(least..=most).to_string(),
            Self::Word(words) => pick(words, rng).to_owned(),
        }
    }
}

/// Returns a random element.
pub(super) fn pick<'a>(all: &[&'a str], rng: &mut StdRng) -> &'a str {
    all.choose(rng).copied().unwrap_or_default()
}

/// The values of the facts in one prompt.
#[derive(Debug, Default)]
pub(super) struct Values(HashSet<String>);

impl Values {
    /// Draws a value that no other fact has.
    pub(super) fn draw(&mut self, value: Value, rng: &mut StdRng) -> String {
        let drawn = self.other(value, rng);
        self.0.insert(drawn.clone());
        drawn
    }

    /// Adds a value.
    pub(super) fn add(&mut self, value: &str) {
        self.0.insert(value.to_owned());
    }

    /// Draws a value that is not the value of a fact.
    fn other(&self, value: Value, rng: &mut StdRng) -> String {
        loop {
            let drawn = value.draw(rng);
            if !self.0.contains(&drawn) {
                return drawn;
            }
        }
    }

    /// Adds sentences until there are at least `words` words: first the fillers, in random order, and then
    /// sentences from the templates, with values that no fact has.
    pub(super) fn lengthen(
        &self,
        sentences: &mut Vec<String>,
        words: usize,
        (fillers, templates): (&[&str], &[&str]),
        rng: &mut StdRng,
    ) {
        let (mut fillers, mut things) = (fillers.to_vec(), THINGS);
        fillers.shuffle(rng);
        things.shuffle(rng);
        let fillers = fillers.into_iter().map(|text| (text, ""));
        // No two sentences differ only in their values, as far as possible.
        let templates = things.iter().cycle().flat_map(|thing| templates.iter().map(|text| (*text, *thing)));
        let mut more = fillers.chain(templates);
        let mut count: usize = sentences.iter().map(|text| text.split_whitespace().count()).sum();
        while count < words
            && let Some((template, thing)) = more.next()
        {
            let mut text = template.replace("{which}", thing);
            for (name, value) in [
                ("{time}", Value::Time),
                ("{date}", Value::Date),
                ("{person}", Value::Person),
                ("{count}", Value::Count(101, 999)),
            ] {
                while text.contains(name) {
                    text = text.replacen(name, &self.other(value, rng), 1);
                }
            }
            count += text.split_whitespace().count();
            sentences.push(text);
        }
    }
}
