//! Notes about invented firms, with several facts each.

use rand::RngExt;
use rand::rngs::StdRng;
use rand::seq::{IndexedRandom, SliceRandom};

use super::Texts;
use super::values::{CITIES, ENDINGS, FIRST, LAST, STEMS, Values};
use crate::eval::{Grader, Question, QuestionKind};

const SYSTEM: &str = "Answer the question from the notes below. Give only the answer, in a few words.";

const FORMS: [&str; 6] = ["Works", "Mills", "Instruments", "Foods", "Marine", "Textiles"];
const PRODUCTS: [&str; 20] = [
    "bicycle chains",
    "wool blankets",
    "canned sardines",
    "weather balloons",
    "church organs",
    "olive oil",
    "ship propellers",
    "paper bags",
    "microscopes",
    "rubber boots",
    "harpsichords",
    "tea kettles",
    "garden tools",
    "sailcloth",
    "pocket watches",
    "ice cream",
    "rope ladders",
    "stage lamps",
    "chess sets",
    "copper wire",
];
/// Sentences about which nothing is asked.
const FILLERS: [&str; 10] = [
    "The canteen is open to visitors on Fridays.",
    "A small museum next to the gate shows old machines.",
    "The firm sponsors the rowing club of the town.",
    "Its delivery vans are painted green and white.",
    "Most of the roof is covered with solar panels.",
    "Apprentices are taken on every autumn.",
    "The main hall burned down once and was rebuilt in brick.",
    "Guided tours have to be booked a week ahead.",
    "A brass band made up of workers plays in summer.",
    "The catalogue appears twice a year.",
];

/// Sentences in longer notes.
const MORE: [&str; 10] = [
    "The {which} warehouse was painted by {person} and has {count} shelves.",
    "On {date} the {which} gate stays closed until {time} for repairs.",
    "A letter from {person} about the {which} roof has hung in the hall for years.",
    "The {which} yard has room for {count} crates and is swept on {date}.",
    "Visitors park behind the {which} building, which is locked at {time}.",
    "{person} keeps the keys of the {which} cellar, where {count} old drawings lie.",
    "Machine number {count} in the {which} hall was bought second-hand from {person}.",
    "The {which} staircase has been closed since {date}, when {person} slipped there.",
    "The bell in the {which} tower rings at {time} and can be heard {count} metres away.",
    "A poster of {date} in the {which} corridor announces a talk by {person}.",
];

/// Wordings of a fact, with placeholders for the firm and the value.
type Wording = [&'static str; 3];
const FOUNDED: Wording = [
    "{firm} was founded in {value}.",
    "The history of {firm} began in {value}.",
    "Since {value}, {firm} has been in business.",
];
const BASED: Wording = [
    "{firm} is based in {value}.",
    "The head office of {firm} stands in {value}.",
    "You will find {firm} in {value}.",
];
const MAKES: Wording = [
    "{firm} makes {value}.",
    "The main product of {firm} is {value}.",
    "It is {value} that {firm} is known for.",
];
const EMPLOYS: Wording = [
    "{firm} employs {value} people.",
    "There are {value} employees at {firm}.",
    "The staff of {firm} numbers {value}.",
];
const LED: Wording = [
    "{firm} is led by {value}.",
    "The director of {firm} is {value}.",
    "At the head of {firm} stands {value}.",
];
const SUPPLIED: Wording = [
    "The largest supplier of {firm} is {value}.",
    "{firm} buys most of its material from {value}.",
    "Most parts reach {firm} from {value}.",
];

/// A firm, with the facts in its note.
#[derive(Debug, Clone)]
struct Firm {
    name: String,
    founded: u32,
    city: &'static str,
    product: &'static str,
    staff: u32,
    director: String,
}

/// Draws notes, and a question about them.
pub(super) fn question(texts: Texts, kind: QuestionKind, rng: &mut StdRng) -> Question {
    let firms = firms(texts.documents, rng);
    let mut values = Values::default();
    for firm in &firms {
        values.add(&firm.director);
        values.add(&firm.staff.to_string());
    }
    let longer = texts.words.map(|words| (words, &values));
    let mut numbers: Vec<usize> = (0..firms.len()).collect();
    numbers.shuffle(rng);
    let (one, other) = (numbers[0], numbers[1]);
    let supplier = (kind == QuestionKind::Reference).then_some((one, firms[other].name.as_str()));
    let documents = firms
        .iter()
        .enumerate()
        .map(|(number, firm)| {
            let supplier = supplier.filter(|(of, _)| *of == number).map(|(_, name)| name);
            note(firm, supplier, longer, rng)
        })
        .collect();
    let (a, b) = (&firms[one], &firms[other]);
    let (question, answer, grader) = match kind {
        QuestionKind::Comparison => compared(a, b, rng),
        QuestionKind::Reference => (
            format!("In which town is the firm based that supplies most to {}?", a.name),
            b.city.to_owned(),
            Grader::Contains,
        ),
        _ => asked(a, rng),
    };
    Question { system: SYSTEM.to_owned(), documents, question, answer, kind, grader }
}

/// Draws firms that have no facts in common.
fn firms(count: usize, rng: &mut StdRng) -> Vec<Firm> {
    fn shuffled<T: Clone>(all: &[T], rng: &mut StdRng) -> Vec<T> {
        let mut all = all.to_vec();
        all.shuffle(rng);
        all
    }
    let (stems, cities, products) = (shuffled(&STEMS, rng), shuffled(&CITIES, rng), shuffled(&PRODUCTS, rng));
    let people: Vec<(usize, usize)> =
        (0..FIRST.len()).flat_map(|first| (0..LAST.len()).map(move |last| (first, last))).collect();
    let people = shuffled(&people, rng);
    let years = shuffled(&(1850..2015).collect::<Vec<u32>>(), rng);
    let staff = shuffled(&(100..1000).collect::<Vec<u32>>(), rng);
    (0..count)
        .map(|i| {
            let mut pick = |list: &[&'static str]| list.choose(rng).copied().unwrap_or_default();
            let name = format!("{}{} {}", stems[i], pick(&ENDINGS), pick(&FORMS));
            let director = format!("{} {}", FIRST[people[i].0], LAST[people[i].1]);
            Firm { name, founded: years[i], city: cities[i], product: products[i], staff: staff[i], director }
        })
        .collect()
}

/// Writes the note about a firm: its facts in random order and wording, among filler sentences. If `longer`
/// holds a number of words, the note has at least as many, with values that no fact has.
fn note(firm: &Firm, supplier: Option<&str>, longer: Option<(usize, &Values)>, rng: &mut StdRng) -> String {
    let (founded, staff) = (firm.founded.to_string(), firm.staff.to_string());
    let facts: [(Wording, &str); 5] = [
        (FOUNDED, &founded),
        (BASED, firm.city),
        (MAKES, firm.product),
        (EMPLOYS, &staff),
        (LED, &firm.director),
    ];
    let mut sentences: Vec<String> = facts
        .into_iter()
        .chain(supplier.map(|name| (SUPPLIED, name)))
        .map(|(wording, value)| {
            let wording = wording.choose(rng).copied().unwrap_or_default();
            wording.replace("{firm}", &firm.name).replace("{value}", value)
        })
        .collect();
    let mut fillers = FILLERS;
    fillers.shuffle(rng);
    sentences.extend(fillers[..3].iter().map(|&filler| filler.to_owned()));
    if let Some((words, values)) = longer {
        values.lengthen(&mut sentences, words, (&fillers[3..], &MORE), rng);
    }
    sentences.shuffle(rng);
    sentences.join(" ")
}

/// Returns a question about a fact in one note, with its answer and its grader.
fn asked(firm: &Firm, rng: &mut StdRng) -> (String, String, Grader) {
    let name = &firm.name;
    match rng.random_range(0..5) {
        0 => (format!("In which year was {name} founded?"), firm.founded.to_string(), Grader::Numbers),
        1 => (format!("In which town is {name} based?"), firm.city.to_owned(), Grader::Contains),
        2 => (format!("What does {name} make?"), firm.product.to_owned(), Grader::Contains),
        3 => (format!("How many people work at {name}?"), firm.staff.to_string(), Grader::Numbers),
        _ => (format!("Who leads {name}?"), firm.director.clone(), Grader::Contains),
    }
}

/// Returns a question about which of two firms is older or larger, with its answer and its grader.
fn compared(a: &Firm, b: &Firm, rng: &mut StdRng) -> (String, String, Grader) {
    let older = rng.random_bool(0.5);
    let (first, what) = if older {
        (a.founded < b.founded, "was founded first")
    } else {
        (a.staff > b.staff, "has more employees")
    };
    let answer = if first { &a.name } else { &b.name };
    let question = format!("Which firm {what}, {} or {}? Answer with its name.", a.name, b.name);
    (question, answer.clone(), Grader::Begins)
}
