//! Questions about short natural-language texts: notes about invented firms, in varied wording, with several
//! facts each.
//!
//! No model has heard of the firms, so every answer must come from the notes. All notes in a prompt are
//! alike, so each note distracts from the rest.

use rand::rngs::StdRng;
use rand::seq::{IndexedRandom, SliceRandom};
use rand::{RngExt, SeedableRng};

use super::{Grader, Question, QuestionKind};

const SYSTEM: &str = "Answer the question from the notes below. Give only the answer, in a few words.";

const STEMS: [&str; 24] = [
    "Nor", "Hel", "Cald", "Bren", "Vost", "Tam", "Ald", "Quill", "Fen", "Mar", "Thorn", "Wex", "Dray", "Lun",
    "Ost", "Pell", "Sev", "Garr", "Ing", "Kest", "Rul", "Yar", "Zem", "Hask",
];
const ENDINGS: [&str; 12] =
    ["vane", "brook", "well", "mark", "ford", "dale", "stead", "worth", "mere", "ley", "ridge", "more"];
const FORMS: [&str; 6] = ["Works", "Mills", "Instruments", "Foods", "Marine", "Textiles"];
const CITIES: [&str; 20] = [
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
const FIRST: [&str; 16] = [
    "Marta", "Ivo", "Selma", "Anton", "Greta", "Pavel", "Nadia", "Oscar", "Livia", "Hugo", "Elsa", "Boris",
    "Clara", "Emil", "Rosa", "Victor",
];
const LAST: [&str; 16] = [
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

/// Notes about invented firms, and questions about them.
///
/// ```
/// use kvlab::{QuestionKind, Texts};
/// let questions = Texts::new(4).questions(7, 10);
/// assert_eq!(questions.len(), 30);
/// assert!(questions.iter().all(|question| question.documents.len() == 4));
/// assert_eq!(questions, Texts::new(4).questions(7, 10));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Texts {
    documents: usize,
}

impl Texts {
    /// The kinds of questions about these texts.
    pub const KINDS: [QuestionKind; 3] =
        [QuestionKind::Local, QuestionKind::Comparison, QuestionKind::Reference];

    /// The maximum number of notes per question. It is limited because each note needs its own city and
    /// product.
    pub const MOST: usize = 20;

    /// Creates a source of questions with `documents` notes each, clamped to the range from 2 to
    /// [`MOST`](Self::MOST).
    pub fn new(documents: usize) -> Self {
        Self { documents: documents.clamp(2, Self::MOST) }
    }

    /// Draws `per_kind` questions of each kind. Equal seeds give equal questions.
    pub fn questions(&self, seed: u64, per_kind: usize) -> Vec<Question> {
        self.questions_of(&Self::KINDS, seed, per_kind)
    }

    /// Draws `per_kind` questions of each of these kinds. Kinds that are not in [`KINDS`](Self::KINDS) are
    /// ignored. Equal seeds and kinds give equal questions.
    pub fn questions_of(&self, kinds: &[QuestionKind], seed: u64, per_kind: usize) -> Vec<Question> {
        let mut rng = StdRng::seed_from_u64(seed);
        let kinds = Self::KINDS.into_iter().filter(|kind| kinds.contains(kind));
        let round = || kinds.clone();
        (0..per_kind).flat_map(|_| round()).map(|kind| self.question(kind, &mut rng)).collect()
    }

    /// Returns decoys: notes of the same form that do not contain the answer to any question.
    pub fn decoys() -> Vec<String> {
        let mut rng = StdRng::seed_from_u64(u64::MAX);
        Self::new(Self::MOST).question(QuestionKind::Local, &mut rng).documents
    }

    fn question(self, kind: QuestionKind, rng: &mut StdRng) -> Question {
        let firms = self.firms(rng);
        let mut numbers: Vec<usize> = (0..firms.len()).collect();
        numbers.shuffle(rng);
        let (one, other) = (numbers[0], numbers[1]);
        let supplier = (kind == QuestionKind::Reference).then_some((one, firms[other].name.as_str()));
        let documents = firms
            .iter()
            .enumerate()
            .map(|(number, firm)| {
                let supplier = supplier.filter(|(of, _)| *of == number).map(|(_, name)| name);
                note(firm, supplier, rng)
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
    fn firms(self, rng: &mut StdRng) -> Vec<Firm> {
        fn shuffled<T: Clone>(all: &[T], rng: &mut StdRng) -> Vec<T> {
            let mut all = all.to_vec();
            all.shuffle(rng);
            all
        }
        let (stems, cities, products) =
            (shuffled(&STEMS, rng), shuffled(&CITIES, rng), shuffled(&PRODUCTS, rng));
        let people: Vec<(usize, usize)> =
            (0..FIRST.len()).flat_map(|first| (0..LAST.len()).map(move |last| (first, last))).collect();
        let people = shuffled(&people, rng);
        let years = shuffled(&(1850..2015).collect::<Vec<u32>>(), rng);
        let staff = shuffled(&(100..1000).collect::<Vec<u32>>(), rng);
        (0..self.documents)
            .map(|i| {
                let mut pick = |list: &[&'static str]| list.choose(rng).copied().unwrap_or_default();
                let name = format!("{}{} {}", stems[i], pick(&ENDINGS), pick(&FORMS));
                let director = format!("{} {}", FIRST[people[i].0], LAST[people[i].1]);
                Firm {
                    name,
                    founded: years[i],
                    city: cities[i],
                    product: products[i],
                    staff: staff[i],
                    director,
                }
            })
            .collect()
    }
}

/// Writes the note about a firm: its facts in random order and wording, among filler sentences.
fn note(firm: &Firm, supplier: Option<&str>, rng: &mut StdRng) -> String {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_answer_is_in_the_notes_that_its_kind_names() {
        for documents in [2, 4, 8, Texts::MOST] {
            let questions = Texts::new(documents).questions(3, 40);
            for q in &questions {
                assert_eq!(q.documents.len(), documents);
                let with = |text: &str| -> Vec<usize> {
                    let whole =
                        |d: &str| [" ", ".", ","].iter().any(|end| d.contains(&format!("{text}{end}")));
                    (0..documents).filter(|&i| whole(&q.documents[i])).collect()
                };
                match q.kind {
                    QuestionKind::Local => assert_eq!(with(&q.answer).len(), 1, "{q:?}"),
                    QuestionKind::Comparison => {
                        let names = q.question.split(", ").nth(1).unwrap().split("? ").next().unwrap();
                        let (a, b) = names.split_once(" or ").unwrap();
                        assert!([a, b].contains(&q.answer.as_str()), "{q:?}");
                        assert!(with(a) != with(b) && with(a).len() == 1, "{q:?}");
                    }
                    _ => {
                        // The note that names the supplier must not give the supplier's town.
                        let firm = q.question.rsplit("most to ").next().unwrap().trim_end_matches('?');
                        let place = with(&q.answer);
                        assert_eq!(place.len(), 1, "{q:?}");
                        assert!(!q.documents[place[0]].contains(firm), "{q:?}");
                    }
                }
                assert!(
                    q.accepts(&q.answer)
                        && q.documents.iter().all(|d| (50..140).contains(&d.split(' ').count()))
                );
            }
            let first = |d: &str| d.split(' ').next().unwrap_or_default().to_owned();
            let openings: std::collections::HashSet<String> =
                questions.iter().map(|q| first(&q.documents[0])).collect();
            assert!(openings.len() > 10, "the wording varies");
        }
        assert_ne!(Texts::new(4).questions(1, 3), Texts::new(4).questions(2, 3));
        let some = Texts::new(4).questions_of(&[QuestionKind::Local, QuestionKind::CrossStart], 1, 3);
        assert!(some.len() == 3 && some.iter().all(|q| q.kind == QuestionKind::Local));
    }
}
