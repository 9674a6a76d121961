//! A search chooses the cheapest kind of reuse that keeps answers right.

use kvlab::{Arm, EvalOptions, GateLimits, Question, QuestionKind, TuneOptions, Tuning, Verdict, World};

use crate::common::tiny_rag;

fn options(candidates: &[&str], limits: GateLimits) -> TuneOptions {
    let candidates = candidates.iter().map(|name| name.parse().unwrap()).collect();
    TuneOptions { candidates, limits, eval: EvalOptions::default() }
}

/// Returns draws of questions that span documents but are marked as local.
fn across(world: &World) -> Vec<Vec<Question>> {
    let draw = |seed| {
        let questions = world.questions(seed, 40).into_iter();
        let across = questions.filter(|question| question.kind == QuestionKind::CrossStart);
        across.map(|question| Question { kind: QuestionKind::Local, ..question }).collect()
    };
    (0..5).map(draw).collect()
}

#[test]
fn the_cheapest_way_that_keeps_the_answers_is_found_and_the_dearer_ones_are_not_asked() {
    let (mut engine, codec, world) = tiny_rag();
    let judged = across(&world);
    let candidates = [
        "full",
        "sequential,with-system,full",
        "sequential,with-system,link:16",
        "sequential,with-system,link:2",
        "sequential,with-system,none",
    ];
    let options = options(&candidates, GateLimits { accuracy: 0.02, ..GateLimits::default() });
    let (mut most, mut last) = (0, 0);
    let mut progress = |done: usize, total: usize| (most, last) = (most.max(done), total);
    let tuning =
        Tuning::search(&mut engine, &codec, (&judged[0][..10], &judged), &options, &mut progress).unwrap();
    let names: Vec<&str> = tuning.rows.iter().map(|row| row.name.as_str()).collect();
    assert_eq!(names[0], "sequential, with-system, none", "the cheapest first");
    let choice = tuning.choice().unwrap();
    assert_eq!(choice.name, "sequential, with-system, link:2");
    assert_eq!(choice.verdict, Some(Verdict::Holds));
    let none = &tuning.rows[0];
    assert_eq!(none.verdict, Some(Verdict::Fails));
    assert_eq!(none.paired.unwrap().asked, 40, "a refuted candidate is asked no more");
    assert_eq!(choice.paired.unwrap().asked, 200);
    assert!(tuning.rows[2..].iter().all(|row| row.paired.is_none()));
    assert!(tuning.rows.iter().all(|row| row.operations > 0.0 && row.operations < 1.0));
    assert!(tuning.right > 0.95 && most > 0 && most <= last);
}

#[test]
fn nothing_is_chosen_where_nothing_can_be_judged() {
    let (mut engine, codec, world) = tiny_rag();
    let judged = across(&world);
    let candidates = ["sequential,with-system,none", "sequential,with-system,link:16"];
    let options = options(&candidates, GateLimits { floor: 1.1, ..GateLimits::default() });
    let tuning =
        Tuning::search(&mut engine, &codec, (&judged[0][..10], &judged), &options, &mut |_, _| ()).unwrap();
    assert!(tuning.choice().is_none() && tuning.rows.iter().all(|row| row.divergence.is_finite()));
    assert!(tuning.rows.iter().all(|row| row.verdict != Some(Verdict::Holds)));
}

#[test]
fn a_search_without_candidates_or_questions_says_so() {
    let (mut engine, codec, world) = tiny_rag();
    let judged = across(&world);
    let mut search = |candidates: &[&str], screened: &[Question], judged: &[Vec<Question>]| {
        let options = options(candidates, GateLimits::default());
        Tuning::search(&mut engine, &codec, (screened, judged), &options, &mut |_, _| ()).map(|_| ())
    };
    let way = ["sequential,with-system,none"];
    for result in [
        search(&["full"], &judged[0], &judged),
        search(&way, &[], &judged),
        search(&way, &judged[0], &[]),
        search(&way, &judged[0], &[Vec::new()]),
    ] {
        assert!(result.unwrap_err().to_string().contains("nothing to tune"));
    }
    assert_eq!(Arm::full_attention().reused(), None);
}
