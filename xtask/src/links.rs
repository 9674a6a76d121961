//! Checks the documents' relative links: each must lead to a file or folder that git tracks.

use std::collections::BTreeSet;

use xtask::run::{Result, none_of, read, root};

/// Checks that every relative link in a tracked Markdown file leads to a tracked file or folder.
pub(crate) fn check(tracked: &[String]) -> Result {
    let known: BTreeSet<&str> = tracked.iter().map(String::as_str).collect();
    let mut broken = Vec::new();
    for file in tracked.iter().filter(|file| is_document(file)) {
        let text = read(&root().join(file))?;
        let dead = links(&text).filter(|link| !leads_somewhere(file, link, &known));
        broken.extend(dead.map(|link| format!("{file} links to {link}")));
    }
    none_of("links to files that git does not track", &broken)
}

fn is_document(file: &str) -> bool {
    std::path::Path::new(file).extension().is_some_and(|ending| ending == "md")
}

/// Returns the relative paths that a Markdown file's links, images and link definitions point to, except in
/// code.
fn links(markdown: &str) -> impl Iterator<Item = String> {
    let mut fenced = false;
    let lines = markdown.lines().filter(move |line| {
        let fence = line.trim_start().starts_with("```");
        fenced ^= fence;
        !fence && !fenced
    });
    let targets = lines.flat_map(|line| {
        let line = without_code(line);
        let inline = line.split("](").skip(1).filter_map(|rest| rest.split(')').next().map(str::to_owned));
        let definition = line.trim_start().strip_prefix('[').and_then(|rest| rest.split_once("]: "));
        let mut targets: Vec<String> = inline.collect();
        targets.extend(definition.map(|(_, target)| target.to_owned()));
        targets
    });
    targets.filter_map(|target| {
        let path = target.split_whitespace().next()?.trim_matches(['<', '>']);
        let path = path.split('#').next().filter(|path| !path.is_empty())?;
        let elsewhere = path.contains("://") || path.starts_with("mailto:");
        (!elsewhere).then(|| path.to_owned())
    })
}

/// Returns the line without its code in backticks. A line with an odd number of backticks is returned
/// unchanged.
fn without_code(line: &str) -> String {
    let parts: Vec<&str> = line.split('`').collect();
    if parts.len().is_multiple_of(2) { line.to_owned() } else { parts.into_iter().step_by(2).collect() }
}

/// Returns true if a link in `file` leads to a tracked file or folder.
fn leads_somewhere(file: &str, link: &str, tracked: &BTreeSet<&str>) -> bool {
    let mut path: Vec<&str> = file.split('/').collect();
    path.pop();
    for part in link.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                if path.pop().is_none() {
                    return false;
                }
            }
            part => path.push(part),
        }
    }
    let path = path.join("/");
    let folder = format!("{path}/");
    let inside = tracked.range(folder.as_str()..).next().is_some_and(|file| file.starts_with(&folder));
    !link.starts_with('/') && (tracked.contains(path.as_str()) || inside)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_targets_outside_of_code_that_lead_to_files() {
        let text = "[a](x.md) and ![b](y/z.svg \"title\"), [`c`](w.md#part), [d](#here), [e](https://a.b/c)\n\
                    `[f](no.md)` [g](mailto:a@b)\n```text\n[h](no.md)\n```\n[i]: <v.md>\n[j][i]\n";
        assert_eq!(links(text).collect::<Vec<_>>(), ["x.md", "y/z.svg", "w.md", "v.md"]);
    }

    #[test]
    fn a_link_leads_to_a_tracked_file_or_a_folder_of_some_and_to_nothing_else() {
        let tracked = BTreeSet::from(["README.md", "docs/a.md", "docs/plots/b.svg", "docs-old/c.md"]);
        let leads = |file, link| leads_somewhere(file, link, &tracked);
        for (file, link) in [
            ("README.md", "docs/a.md"),
            ("README.md", "docs"),
            ("README.md", "./docs/plots/"),
            ("docs/a.md", "plots/b.svg"),
            ("docs/a.md", "../README.md"),
        ] {
            assert!(leads(file, link), "{file} to {link}");
        }
        for (file, link) in [
            ("README.md", "a.md"),
            ("README.md", "doc"),
            ("docs/a.md", "plots/c.svg"),
            ("docs/a.md", "../../README.md"),
            ("README.md", "/README.md"),
        ] {
            assert!(!leads(file, link), "{file} to {link}");
        }
    }

    #[test]
    fn every_page_of_this_repository_is_read() {
        assert!(["README.md", "docs/decisions/base.md", "kvcore/README.md"].into_iter().all(is_document));
        assert!(!is_document("docs/quality.svg") && !is_document("md"));
    }
}
