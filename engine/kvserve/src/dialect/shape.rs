//! The fields with which requests ask for calls of tools and for JSON.

use kvengine::AnswerForm;
use kvmodel::Variable;

use crate::refusal::Refusal;
use crate::shape::{AnswerShape, ToolChoice, Tools, value};

/// The maximum number of tools of a request.
const MAX_TOOLS: usize = 128;
/// The maximum length of a tool's name.
const MAX_NAME: usize = 128;

/// The form in which a dialect writes a tool.
pub(crate) struct ToolForm {
    /// The field of a tool in which the function stands, if there is one.
    pub(crate) within: Option<&'static str>,
    /// The field with the schema of the arguments.
    pub(crate) schema: &'static str,
    /// The type of a function.
    pub(crate) kind: &'static str,
    /// True if the type may be missing.
    pub(crate) kind_is_optional: bool,
}

/// Fields of tools that change nothing here: schemas bind forced calls in any case, and everything is cached.
const IGNORED: [&str; 6] = [
    "strict",
    "cache_control",
    "defer_loading",
    "allowed_callers",
    "eager_input_streaming",
    "input_examples",
];

impl ToolForm {
    /// Reads tools, and returns them as in `OpenAI`'s chats.
    ///
    /// # Errors
    /// Refuses malformed tools by their place.
    pub(crate) fn read(&self, given: Option<&Variable>) -> Result<Vec<Variable>, Refusal> {
        let list = match given {
            None | Some(Variable::None) => return Ok(Vec::new()),
            Some(Variable::List(list)) => list,
            Some(_) => return Err(Refusal::field("tools", "tools must be a list of tools")),
        };
        if list.len() > MAX_TOOLS {
            let reason = format!("{} tools are more than the limit of {MAX_TOOLS}", list.len());
            return Err(Refusal::field("tools", reason));
        }
        let mut names: Vec<&str> = Vec::new();
        let mut all = Vec::new();
        for (i, tool) in list.iter().enumerate() {
            let place = format!("tools[{i}]");
            let (name, tool) = self.tool(&place, tool)?;
            if names.contains(&name) {
                let reason = format!("two tools have the name {name:?}; give each tool its own name");
                return Err(Refusal::field(place, reason));
            }
            names.push(name);
            all.push(tool);
        }
        Ok(all)
    }

    fn tool<'a>(&self, place: &str, tool: &'a Variable) -> Result<(&'a str, Variable), Refusal> {
        if !matches!(tool, Variable::Map(_)) {
            return Err(Refusal::field(place, format!("{place} must be an object")));
        }
        match tool.field("type") {
            None | Some(Variable::None) if self.kind_is_optional => {}
            Some(Variable::Text(kind)) if kind == self.kind => {}
            Some(Variable::Text(kind)) => {
                let reason = format!(
                    "tools of the type {kind:?} are not supported; give tools of the type {:?}",
                    self.kind
                );
                return Err(Refusal::field(format!("{place}.type"), reason));
            }
            _ => {
                let reason = format!("{place}.type must be {:?}", self.kind);
                return Err(Refusal::field(format!("{place}.type"), reason));
            }
        }
        let (place, function) = match self.within {
            None => (place.to_owned(), tool),
            Some(within) => {
                check_fields(place, tool, &["type", within])?;
                let place = format!("{place}.{within}");
                let Some(function @ Variable::Map(_)) = tool.field(within) else {
                    return Err(Refusal::field(place.clone(), format!("{place} must be an object")));
                };
                (place, function)
            }
        };
        check_fields(&place, function, &["type", "name", "description", self.schema])?;
        let name = match function.field("name") {
            Some(Variable::Text(name)) if is_name(name) => name.as_str(),
            _ => {
                let place = format!("{place}.name");
                let reason = format!(
                    "{place} must be a string of 1 to {MAX_NAME} letters, digits and the signs `_`, `-` and `.`"
                );
                return Err(Refusal::field(place, reason));
            }
        };
        let mut all = vec![("name".to_owned(), name.into())];
        match function.field("description") {
            None | Some(Variable::None) => {}
            Some(text @ Variable::Text(_)) => all.push(("description".to_owned(), text.clone())),
            Some(_) => {
                let place = format!("{place}.description");
                return Err(Refusal::field(place.clone(), format!("{place} must be a string")));
            }
        }
        let parameters = match function.field(self.schema) {
            None | Some(Variable::None) => fields([("type", "object".into()), ("properties", fields([]))]),
            Some(schema @ Variable::Map(_)) => schema.clone(),
            Some(_) => {
                let place = format!("{place}.{}", self.schema);
                let reason = format!("{place} must be a JSON schema, which is an object");
                return Err(Refusal::field(place, reason));
            }
        };
        all.push(("parameters".to_owned(), parameters));
        Ok((name, fields([("type", "function".into()), ("function", Variable::Map(all))])))
    }
}

/// Returns the shape of answers with tools, a choice among them, and a form of the text.
///
/// # Errors
/// Refuses a choice of a tool that is not there.
pub(crate) fn shape(
    tools: Vec<Variable>,
    choice: ToolChoice,
    several: bool,
    form: Option<(&'static str, AnswerForm)>,
) -> Result<AnswerShape, Refusal> {
    let is_named = |name: &str| {
        let own =
            |tool: &Variable| tool.field("function").and_then(|function| function.field("name")).cloned();
        tools.iter().any(|tool| own(tool) == Some(name.into()))
    };
    if let ToolChoice::Allowed { names, required } = &choice {
        if let Some(name) = names.iter().find(|name| !is_named(name)) {
            let reason = format!("tool_choice names {name:?}, but there is no tool with this name");
            return Err(Refusal::field("tool_choice", reason));
        }
        let is_allowed = |tool: &Variable| {
            let name = tool.field("function").and_then(|function| function.field("name"));
            names.iter().any(|allowed| name == Some(&allowed.as_str().into()))
        };
        let tools = tools.into_iter().filter(is_allowed).collect();
        let choice = if *required { ToolChoice::Required } else { ToolChoice::Auto };
        return shape(tools, choice, several, form);
    }
    match &choice {
        ToolChoice::Required if tools.is_empty() => Err(Refusal::field(
            "tool_choice",
            "tool_choice asks for a call, but there are no tools; give some",
        )),
        ToolChoice::Named(name) if !is_named(name) => {
            let reason = format!("tool_choice names {name:?}, but there is no tool with this name");
            Err(Refusal::field("tool_choice", reason))
        }
        ToolChoice::None => Ok(AnswerShape::new(form, None)),
        _ if tools.is_empty() => Ok(AnswerShape::new(form, None)),
        _ => Ok(AnswerShape::new(form, Some(Tools { list: tools, choice, several }))),
    }
}

/// Returns a JSON schema as the form of an answer. `field` has it at `place`.
///
/// # Errors
/// Refuses what is no object.
pub(crate) fn schema(
    field: &'static str,
    place: &str,
    given: Option<&Variable>,
) -> Result<Option<(&'static str, AnswerForm)>, Refusal> {
    match given {
        Some(schema @ Variable::Map(_)) => Ok(Some((field, AnswerForm::JsonSchema(value(field, schema)?)))),
        _ => Err(Refusal::field(place, format!("{place} must be a JSON schema, which is an object"))),
    }
}

/// Returns the type of an object in `field`.
///
/// # Errors
/// Refuses what is no object with a type.
pub(crate) fn kind<'a>(field: &str, given: &'a Variable) -> Result<&'a str, Refusal> {
    match given.field("type") {
        Some(Variable::Text(kind)) => Ok(kind),
        _ => Err(Refusal::field(format!("{field}.type"), format!("{field} must be an object with a type"))),
    }
}

/// Refuses a type of `field` that is none of those that are known.
pub(crate) fn unknown_kind(field: &str, kind: &str, known: &str) -> Refusal {
    Refusal::field(format!("{field}.type"), format!("the type {kind:?} is not supported; use {known}"))
}

/// Returns a field that must be a name of a tool.
///
/// # Errors
/// Refuses anything else, by its place.
pub(crate) fn tool_name(place: &str, given: Option<&Variable>) -> Result<ToolChoice, Refusal> {
    match given {
        Some(Variable::Text(name)) => Ok(ToolChoice::Named(name.clone())),
        _ => Err(Refusal::field(place, format!("{place} must be the name of a tool"))),
    }
}

/// Refuses fields that are neither known nor ignored.
fn check_fields(place: &str, given: &Variable, known: &[&str]) -> Result<(), Refusal> {
    let Variable::Map(given) = given else { return Ok(()) };
    let is_known = |name: &str| known.contains(&name) || IGNORED.contains(&name);
    match given.iter().find(|(name, _)| !is_known(name)) {
        None => Ok(()),
        Some((name, _)) => {
            let reason = format!("unknown parameter: {name:?}; remove it, or check its spelling");
            let refusal = Refusal::field(format!("{place}.{name}"), reason);
            Err(Refusal { code: Some("unknown_parameter"), ..refusal })
        }
    }
}

fn is_name(name: &str) -> bool {
    (1..=MAX_NAME).contains(&name.len())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || "_-.".contains(c))
}

fn fields<const N: usize>(given: [(&str, Variable); N]) -> Variable {
    Variable::Map(given.map(|(name, value)| (name.to_owned(), value)).to_vec())
}
