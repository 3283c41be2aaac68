//! What little XML is needed: a reader into a tree, by local names (libvirt may give elements back
//! without their namespace), and a writer that escapes.

use quick_xml::Writer;
use quick_xml::events::{BytesEnd, BytesStart, BytesText, Event};
use quick_xml::reader::Reader;

/// Text that was not XML.
#[derive(Debug, Clone, thiserror::Error)]
#[error("not readable as XML: {0}")]
pub struct BadXml(String);

/// An element: local name, attributes by local name, children, text.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Element {
    pub name: String,
    pub attributes: Vec<(String, String)>,
    pub children: Vec<Element>,
    pub text: String,
}

impl Element {
    pub fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            ..Self::default()
        }
    }

    #[must_use]
    pub fn attr(mut self, name: &str, value: impl Into<String>) -> Self {
        self.attributes.push((name.to_owned(), value.into()));
        self
    }

    #[must_use]
    pub fn text(mut self, text: impl Into<String>) -> Self {
        self.text = text.into();
        self
    }

    #[must_use]
    pub fn child(mut self, child: Self) -> Self {
        self.children.push(child);
        self
    }

    #[must_use]
    pub fn children(mut self, children: impl IntoIterator<Item = Self>) -> Self {
        self.children.extend(children);
        self
    }

    /// The value of an attribute.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.attributes
            .iter()
            .find(|(n, _)| n == name)
            .map(|(_, value)| value.as_str())
    }

    /// The first element along a path of local names.
    pub fn find(&self, path: &[&str]) -> Option<&Self> {
        match path {
            [] => Some(self),
            [first, rest @ ..] => self
                .children
                .iter()
                .filter(|c| c.name == *first)
                .find_map(|c| c.find(rest)),
        }
    }

    /// All children of that local name.
    pub fn all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Self> {
        self.children.iter().filter(move |c| c.name == name)
    }

    /// The trimmed text along a path.
    pub fn text_at(&self, path: &[&str]) -> Option<&str> {
        self.find(path).map(|e| e.text.trim())
    }

    /// Reads a document's root.
    ///
    /// # Errors
    /// [`BadXml`].
    pub fn parse(text: &str) -> Result<Self, BadXml> {
        let bad = |error: &dyn std::fmt::Display| BadXml(error.to_string());
        let mut reader = Reader::from_str(text);
        let mut open: Vec<Self> = Vec::new();
        loop {
            let event = reader.read_event().map_err(|error| bad(&error))?;
            let closed = match event {
                Event::Start(start) => {
                    open.push(element(&start)?);
                    if open.len() > 256 {
                        return Err(BadXml("nested too deeply".to_owned()));
                    }
                    None
                }
                Event::Empty(start) => Some(element(&start)?),
                Event::End(_) => open.pop(),
                Event::Text(text) => {
                    if let Some(top) = open.last_mut() {
                        top.text
                            .push_str(&text.decode().map_err(|error| bad(&error))?);
                    }
                    None
                }
                Event::CData(data) => {
                    if let Some(top) = open.last_mut() {
                        top.text
                            .push_str(&data.decode().map_err(|error| bad(&error))?);
                    }
                    None
                }
                Event::GeneralRef(reference) => {
                    let name = reference.decode().map_err(|error| bad(&error))?;
                    let escaped = format!("&{name};");
                    let plain =
                        quick_xml::escape::unescape(&escaped).map_err(|error| bad(&error))?;
                    if let Some(top) = open.last_mut() {
                        top.text.push_str(&plain);
                    }
                    None
                }
                Event::Eof => return Err(BadXml("it ends early".to_owned())),
                _ => None,
            };
            if let Some(closed) = closed {
                match open.last_mut() {
                    Some(parent) => parent.children.push(closed),
                    None => return Ok(closed),
                }
            }
        }
    }

    /// As a document, indented, with a line end.
    pub fn to_document(&self) -> String {
        let mut writer = Writer::new_with_indent(Vec::new(), b' ', 2);
        // A Vec does not fail to take bytes, and the writer has no other failure.
        let _ = self.write(&mut writer);
        let mut text = String::from_utf8_lossy(&writer.into_inner()).into_owned();
        text.push('\n');
        text
    }

    fn write(&self, writer: &mut Writer<Vec<u8>>) -> std::io::Result<()> {
        let mut start = BytesStart::new(self.name.as_str());
        for (name, value) in &self.attributes {
            start.push_attribute((name.as_str(), value.as_str()));
        }
        if self.children.is_empty() && self.text.is_empty() {
            return writer.write_event(Event::Empty(start));
        }
        writer.write_event(Event::Start(start))?;
        if !self.text.is_empty() {
            writer.write_event(Event::Text(BytesText::new(&self.text)))?;
        }
        for child in &self.children {
            child.write(writer)?;
        }
        writer.write_event(Event::End(BytesEnd::new(self.name.as_str())))
    }
}

fn element(start: &BytesStart<'_>) -> Result<Element, BadXml> {
    let local = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let mut element = Element::new(&local(start.local_name().as_ref()));
    for attribute in start.attributes() {
        let attribute = attribute.map_err(|error| BadXml(error.to_string()))?;
        let value = String::from_utf8_lossy(&attribute.value).into_owned();
        let value = quick_xml::escape::unescape(&value)
            .map_err(|error| BadXml(error.to_string()))?
            .into_owned();
        element
            .attributes
            .push((local(attribute.key.local_name().as_ref()), value));
    }
    Ok(element)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_back_whatever_it_holds() {
        let nasty = "a<b>&\"'\n]]> ü";
        let element = Element::new("x")
            .attr("y", nasty)
            .child(Element::new("z").text(nasty))
            .child(Element::new("empty"));
        let text = element.to_document();
        let read = Element::parse(&text).unwrap();
        assert_eq!(read.get("y"), Some(nasty));
        assert_eq!(read.find(&["z"]).unwrap().text, nasty);
        assert!(read.find(&["empty"]).is_some());
    }

    #[test]
    fn namespaces_are_passed_over_and_broken_text_is_refused() {
        let read = Element::parse("<?xml version='1.0'?><a:b xmlns:a='u'><a:c d='1'>t</a:c></a:b>")
            .unwrap();
        assert_eq!(read.name, "b");
        assert_eq!(read.text_at(&["c"]), Some("t"));
        for bad in ["", "x", "<a>", "<a></b>", "<a", "<a b=></a>"] {
            assert!(Element::parse(bad).is_err(), "{bad:?}");
        }
    }
}
