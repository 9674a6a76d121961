//! Graders: rules that decide whether an answer is right.

use serde::{Deserialize, Serialize};

/// The rule that decides whether an answer is right. Case, and white space at both ends, are ignored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Grader {
    /// The given answer begins with the right answer, in whole words.
    #[default]
    Begins,
    /// The given answer equals the right answer, except for a full stop at the end.
    Exact,
    /// The given answer contains the right answer, in whole words.
    Contains,
    /// The first number in the given answer is the right number. Signs matter; commas between digits do
    /// not.
    Numbers,
    /// The words of both answers overlap with an F1 score of at least 0.5. (`SQuAD`, Rajpurkar et al., 2016,
    /// averages this score.)
    TokenF1,
}

/// The minimum F1 score for a right answer.
const LEAST_F1: f64 = 0.5;

/// Returns true for a character of a script without spaces between words. Each such character counts as a
/// word.
fn is_word(c: char) -> bool {
    matches!(c,
        '\u{0e00}'..='\u{0eff}' | '\u{1000}'..='\u{109f}' | '\u{1780}'..='\u{17ff}' // Thai, Lao, Burmese, Khmer
        | '\u{3040}'..='\u{30ff}' | '\u{3400}'..='\u{4dbf}' | '\u{4e00}'..='\u{9fff}' // Kana, Han
        | '\u{f900}'..='\u{faff}' | '\u{20000}'..='\u{3ffff}')
}

/// Returns true for a character that continues the word before it.
fn goes_on(c: char) -> bool {
    c.is_alphanumeric() && !is_word(c)
}

/// Returns the words of a string: runs of letters and digits, and single characters of scripts without
/// spaces.
fn words(text: &str) -> Vec<String> {
    let (mut words, mut open) = (Vec::<String>::new(), false);
    for c in text.chars() {
        match words.last_mut() {
            Some(word) if open && goes_on(c) => word.push(c),
            _ if c.is_alphanumeric() || is_word(c) => words.push(c.into()),
            _ => {}
        }
        open = goes_on(c);
    }
    words.iter().map(|word| word.to_lowercase()).collect()
}

/// Returns the numbers in a string. A trailing decimal point is ignored. A minus sign counts unless it
/// follows a letter or digit.
fn numbers(text: &str) -> Vec<f64> {
    let text: Vec<char> = text.chars().collect();
    let is_inner = |i: usize, c: char| {
        text[i] == c
            && i > 0
            && text[i - 1].is_ascii_digit()
            && text.get(i + 1).is_some_and(char::is_ascii_digit)
    };
    let is_sign = |i: usize| {
        text.get(i + 1).is_some_and(char::is_ascii_digit) && !(i > 0 && text[i - 1].is_alphanumeric())
    };
    let kept: String = (0..text.len())
        .filter(|&i| !is_inner(i, ','))
        .map(|i| match text[i] {
            c if c.is_ascii_digit() || is_inner(i, '.') => c,
            '-' | '−' if is_sign(i) => '-',
            _ => ' ',
        })
        .collect();
    kept.split_whitespace().filter_map(|number| number.parse().ok()).collect()
}

/// Returns the harmonic mean of the precision and recall of words.
fn f1(given: &[String], right: &[String]) -> f64 {
    let mut left = right.to_vec();
    let common = given.iter().filter(|word| {
        let found = left.iter().position(|other| other == *word);
        found.map(|at| left.swap_remove(at)).is_some()
    });
    let common = common.count() as f64;
    if common == 0.0 { 0.0 } else { 2.0 * common / (given.len() + right.len()) as f64 }
}

impl Grader {
    /// Returns true if `answer` is right.
    ///
    /// ```
    /// use kvlab::Grader;
    /// assert!(Grader::Begins.accepts("Red, of course", "red") && !Grader::Begins.accepts("reddish", "red"));
    /// assert!(Grader::Exact.accepts("Red.", "red") && !Grader::Exact.accepts("Red it is", "red"));
    /// assert!(Grader::Contains.accepts("It is in Port Vell.", "port vell"));
    /// assert!(Grader::Numbers.accepts("About 1,250 people", "1250") && !Grader::Numbers.accepts("12 or 1250", "1250"));
    /// assert!(Grader::TokenF1.accepts("the old mill", "old mill") && !Grader::TokenF1.accepts("the sea", "old mill"));
    /// ```
    pub fn accepts(self, answer: &str, right: &str) -> bool {
        let (given, right) = (answer.trim().to_lowercase(), right.trim().to_lowercase());
        match self {
            Self::Begins => {
                let rest = given.strip_prefix(&right);
                rest.is_some_and(|rest| !rest.chars().next().is_some_and(goes_on))
            }
            Self::Exact => given.trim_end_matches('.').trim_end() == right.trim_end_matches('.').trim_end(),
            Self::Contains => {
                let (given, right) = (words(&given), words(&right));
                !right.is_empty() && given.windows(right.len()).any(|window| window == right)
            }
            Self::Numbers => match (numbers(&given).first(), numbers(&right).first()) {
                (Some(given), Some(right)) => given == right,
                _ => false,
            },
            Self::TokenF1 => f1(&words(&given), &words(&right)) >= LEAST_F1,
        }
    }

    /// Returns an objection if no answer can ever be graded as right against this right answer.
    pub(super) fn objection(self, right: &str) -> Option<&'static str> {
        match self {
            Self::Contains | Self::TokenF1 if words(right).is_empty() => Some("it has no words"),
            Self::Numbers if numbers(right).is_empty() => Some("it has no numbers"),
            _ => None,
        }
    }

    /// Returns true if no continuation of `answer` can change its grade.
    ///
    /// The last word and the last number of an answer may still grow, so they do not count.
    pub(super) fn is_decided(self, answer: &str, right: &str) -> bool {
        let given = answer.trim_start();
        match self {
            Self::Begins => given.chars().count() > right.trim().chars().count(),
            Self::Exact | Self::TokenF1 => false,
            Self::Contains => self.accepts(given.trim_end_matches(goes_on), right),
            Self::Numbers => {
                let grows = |c: char| c.is_ascii_digit() || matches!(c, '.' | ',');
                !numbers(given.trim_end_matches(grows)).is_empty()
            }
        }
    }

    /// Returns the number of tokens to allow for an answer if the right answer has `tokens` tokens.
    pub(super) fn room(self, tokens: usize) -> usize {
        match self {
            Self::Begins | Self::Exact => tokens + 2,
            // The model may put the answer into a sentence.
            Self::Contains | Self::Numbers | Self::TokenF1 => tokens + 24,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_as_people_write_them() {
        assert_eq!(numbers("1,250 or 3.5, 7."), [1250.0, 3.5, 7.0]);
        assert_eq!(numbers("none, not one."), [] as [f64; 0]);
        assert_eq!(numbers("-5 or −3.5, 3-5, a-1"), [-5.0, -3.5, 3.0, 5.0, 1.0]);
        assert!(!Grader::Numbers.accepts("-5 degrees", "5") && Grader::Numbers.accepts("It is -5.", "-5"));
        assert!(!Grader::Numbers.accepts("none", "4") && !Grader::Numbers.accepts("4", "four"));
    }

    #[test]
    fn what_follows_a_decided_answer_changes_nothing() {
        let texts = [
            "It is in Port Vell, I think. Or 1,250, or 12?",
            "port vell",
            "1250 people",
            " Red. Or not",
            "在北京市, -12",
        ];
        let rights = ["Port Vell", "1250", "red", "port", "北京", "-12"];
        let all = [Grader::Begins, Grader::Exact, Grader::Contains, Grader::Numbers, Grader::TokenF1];
        let mut decided = 0;
        for (text, right, grader) in
            texts.iter().flat_map(|t| rights.iter().flat_map(move |r| all.map(|g| (*t, *r, g))))
        {
            let ends = (0..=text.len()).filter(|&end| text.is_char_boundary(end));
            for end in ends.filter(|&end| grader.is_decided(&text[..end], right)) {
                decided += 1;
                let (early, late) = (grader.accepts(&text[..end], right), grader.accepts(text, right));
                assert_eq!(early, late, "{grader:?}: {:?} of {text:?}, right is {right:?}", &text[..end]);
            }
        }
        assert!(decided > 100, "{decided}");
    }

    #[test]
    fn scripts_without_spaces_have_a_word_a_character() {
        assert_eq!(words("在Berlin市 ok"), ["在", "berlin", "市", "ok"]);
        assert!(
            Grader::Contains.accepts("它在北京市。", "北京")
                && !Grader::Contains.accepts("它在南京市。", "北京")
        );
        assert!(Grader::Begins.accepts("北京市", "北京") && Grader::TokenF1.accepts("在北京", "北京"));
    }

    #[test]
    fn right_answers_that_nothing_meets_are_objected_to() {
        assert!(Grader::Numbers.objection("four").is_some() && Grader::Numbers.objection("4 men").is_none());
        assert!(Grader::Contains.objection("!!!").is_some() && Grader::TokenF1.objection("a!").is_none());
        assert!(Grader::Exact.objection("!!!").is_none());
    }

    #[test]
    fn words_are_whole() {
        assert!(!Grader::Contains.accepts("Portvell", "port") && !Grader::Contains.accepts("any", ""));
        assert!(Grader::Contains.accepts("In PORT  Vell!", "port vell"));
        assert!(Grader::Exact.accepts(" 1910. ", "1910") && !Grader::Exact.accepts("In 1910", "1910"));
        assert!((f1(&words("a b c d"), &words("c d")) - 2.0 / 3.0).abs() < 1e-12);
        assert!(f1(&words("a a"), &words("a")) < 0.7, "a word counts once");
    }
}
