//! The number of levels that compiling a JSON schema goes down, through nested values and through references.

use std::collections::{HashMap, HashSet};

use serde_json::Value;

/// The maximum number of levels of nested objects and lists.
pub(super) const MAX_NESTED: usize = 100;

/// The maximum number of levels of the whole schema and of all parts that it refers to, together. The library calls
/// itself for each of them, so a thread that compiles needs a stack for so many.
pub(super) const MAX_TOGETHER: usize = 4000;

/// The levels of a schema.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Levels {
    /// The levels of nested objects and lists.
    pub(super) nested: usize,
    /// The levels of the schema and of each part that it refers to, summed up. The library compiles a part once, so it
    /// cannot go further down, in whatever order it follows references.
    pub(super) together: usize,
}

impl Levels {
    /// Counts the levels of a schema without calling itself.
    pub(super) fn of(schema: &Value) -> Self {
        let heights = heights(schema);
        let height = |value: &Value| heights.get(&std::ptr::from_ref(value)).copied().unwrap_or(0);
        let mut targets = HashSet::new();
        let mut open = vec![schema];
        while let Some(value) = open.pop() {
            match value {
                Value::Array(items) => open.extend(items),
                Value::Object(fields) => {
                    targets.extend(fields.get("$ref").and_then(Value::as_str));
                    open.extend(fields.values());
                }
                _ => {}
            }
        }
        let parts = targets.iter().filter_map(|target| part(schema, target)).map(height);
        let nested = height(schema);
        Self { nested, together: nested + parts.sum::<usize>() }
    }
}

/// Returns the number of levels of each object and list within a value.
fn heights(value: &Value) -> HashMap<*const Value, usize> {
    // Each one stands behind the one that contains it.
    let mut all: Vec<(&Value, usize)> = vec![(value, 0)];
    let mut next = 0;
    while let Some(&(value, _)) = all.get(next) {
        match value {
            Value::Array(items) => all.extend(items.iter().map(|item| (item, next))),
            Value::Object(fields) => all.extend(fields.values().map(|field| (field, next))),
            _ => {}
        }
        next += 1;
    }
    let mut heights: Vec<usize> = vec![0; all.len()];
    for (at, &(value, outer)) in all.iter().enumerate().rev() {
        heights[at] += usize::from(value.is_array() || value.is_object());
        heights[outer] = heights[outer].max(if at > 0 { heights[at] } else { 0 });
    }
    all.iter().map(|(value, _)| std::ptr::from_ref(*value)).zip(heights).collect()
}

/// Returns the part of a schema that a reference means, as the library finds it.
fn part<'a>(schema: &'a Value, target: &str) -> Option<&'a Value> {
    let path = match target.strip_prefix('#')? {
        "" | "/" => return Some(schema),
        path => path.strip_prefix('/')?,
    };
    path.split('/').try_fold(schema, |value, name| match value {
        Value::Array(items) => items.get(name.parse::<usize>().ok()?),
        value => value.get(name),
    })
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::json;

    use super::*;

    #[rstest]
    #[case::nothing(json!(true), 0, 0)]
    #[case::nested(json!({"items": {"items": [{}]}, "a": {}}), 4, 4)]
    #[case::itself(json!({"items": {"$ref": "#"}}), 2, 4)]
    #[case::twice(json!({"a": {"$ref": "#/b"}, "c": {"$ref": "#/b"}, "b": {"d": {}}}), 3, 5)]
    #[case::chain(json!({"$ref": "#/a", "a": {"$ref": "#/b"}, "b": {"$ref": "#/c/0"}, "c": [{}]}), 3, 6)]
    #[case::elsewhere(json!({"a": {"$ref": "#/none"}, "b": {"$ref": "https://example.com"}, "c": {"$ref": 5}}), 2, 2)]
    fn levels_are_those_of_the_schema_and_of_each_part_that_it_refers_to(
        #[case] schema: Value,
        #[case] nested: usize,
        #[case] together: usize,
    ) {
        assert_eq!(Levels::of(&schema), Levels { nested, together });
    }
}
