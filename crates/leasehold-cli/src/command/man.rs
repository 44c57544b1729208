//! `leasehold man`: the manual pages.
//!
//! The page generator puts the text after the help into one section and fills its lines, so that examples run together.
//! Here each part of that text is a section of its own, and indented lines stay as they are.

use std::fmt::Write;

use clap::Command;
use clap_mangen::Man;

use crate::args::{self, ManArgs};
use crate::failure::Failure;
use crate::output;

/// The definition with which the generator begins a page.
const APOSTROPHE: &str = ".ie \\n(.g .ds Aq \\(aq\n.el .ds Aq '\n";

/// The variables that stand in for options, as far as a subcommand has the option.
const VARIABLES: [(&str, &str, &str); 6] = [
    (
        "LEASEHOLD_STORE",
        "store",
        "The store. A URL on the command line is visible to other users in ps; this variable is not. The child inherits it.",
    ),
    ("LEASEHOLD_NAMESPACE", "namespace", "The prefix of the keys of semaphores, on Redis."),
    ("LEASEHOLD_LOCK_PREFIX", "lock_prefix", "The prefix of the keys of locks, on Redis."),
    (
        "LEASEHOLD_LOCK_LAYOUT",
        "lock_layout",
        "The version of SyncGuard with which locks are shared, on Redis.",
    ),
    (
        "LEASEHOLD_CA_CERTIFICATE",
        "ca_certificate",
        "A PEM file with the only authorities to trust, over TLS.",
    ),
    ("LEASEHOLD_VERBOSE", "verbose", "If it is set to 1: report what happens, as with -v."),
];

pub(crate) fn run(arguments: &ManArgs) -> Result<u8, Failure> {
    let mut all = args::definition();
    all.build();
    let command = match &arguments.command {
        None => all,
        Some(name) => {
            let found = all.find_subcommand_mut(name).ok_or_else(|| {
                Failure::usage(format!("there is no subcommand {name:?}: see `leasehold --help`"))
            })?;
            // The generator's own synopsis leaves out the `--` before the child.
            let usage = found.render_usage().to_string();
            let usage = usage.trim_start_matches("Usage: ").to_owned();
            let found = found.clone().override_usage(usage);
            found.bin_name(format!("leasehold {name}")).display_name(format!("leasehold-{name}"))
        }
    };
    output::print(&page(command)?)?;
    Ok(0)
}

fn page(command: Command) -> Result<String, Failure> {
    let after = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    let has_subcommands = command.has_subcommands();
    let environment = environment(&command);
    let source = concat!("leasehold ", env!("CARGO_PKG_VERSION"));
    let man = Man::new(command).source(source);
    let mut page = Vec::new();
    let rendered =
        man.render_title(&mut page)
            .and_then(|()| man.render_name_section(&mut page))
            .and_then(|()| man.render_synopsis_section(&mut page))
            .and_then(|()| man.render_description_section(&mut page))
            .and_then(|()| man.render_options_section(&mut page))
            .and_then(|()| {
                if has_subcommands { man.render_subcommands_section(&mut page) } else { Ok(()) }
            });
    rendered.map_err(|error| Failure::internal("no manual page", error))?;
    let page = String::from_utf8_lossy(&page).into_owned();
    // Every section that the generator renders defines the apostrophe again.
    let page = format!("{APOSTROPHE}{}", page.replace(APOSTROPHE, ""));
    Ok(page + &environment + &sections(&after))
}

/// The section about the variables that this command reads.
fn environment(command: &Command) -> String {
    // The page of all subcommands is about all variables.
    let reads = |id: &str| {
        command.has_subcommands() || command.get_arguments().any(|argument| argument.get_id() == id)
    };
    let mut text = String::new();
    for (name, _, meaning) in VARIABLES.iter().filter(|(_, id, _)| reads(id)) {
        let _ = write!(text, ".TP\n\\fB{}\\fR\n{}\n", escaped(name), escaped(meaning));
    }
    if text.is_empty() { text } else { format!(".SH ENVIRONMENT\n{text}") }
}

/// Turns the text after the help into sections. A paragraph whose first line is a title such as "Examples:" is a section
/// of its own; the other paragraphs are notes.
fn sections(text: &str) -> String {
    let (mut titled, mut notes) = (String::new(), String::new());
    for paragraph in text.split("\n\n") {
        let (first, rest) = paragraph.split_once('\n').unwrap_or((paragraph, ""));
        let title = match first {
            "Examples:" => Some("EXAMPLES"),
            "Exit codes:" => Some("EXIT STATUS"),
            _ => None,
        };
        match title {
            Some(title) => {
                let _ = write!(titled, ".SH \"{title}\"\n{}", lines(rest));
            }
            None => {
                let _ = write!(notes, ".PP\n{}", lines(paragraph));
            }
        }
    }
    if notes.is_empty() { titled } else { format!("{titled}.SH NOTES\n{notes}") }
}

/// Lines that are filled, and indented lines that are not.
fn lines(text: &str) -> String {
    let (mut page, mut fixed) = (String::new(), false);
    for line in text.lines() {
        if line.starts_with("  ") != fixed {
            fixed = !fixed;
            page.push_str(if fixed { ".nf\n" } else { ".fi\n" });
        }
        let _ = writeln!(page, "{}", escaped(line));
    }
    if fixed {
        page.push_str(".fi\n");
    }
    page
}

fn escaped(line: &str) -> String {
    let line = line.replace('\\', "\\e").replace('-', "\\-").replace('\'', "\\(aq");
    if line.starts_with('.') { format!("\\&{line}") } else { line }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn examples_keep_their_lines() {
        let text = "Examples:\n  a -- 'b'\n  c\n\nSome text\nand more.\n\nExit codes:\n  0  ok";
        let expected = ".SH \"EXAMPLES\"\n.nf\n  a \\-\\- \\(aqb\\(aq\n  c\n.fi\n\
                        .SH \"EXIT STATUS\"\n.nf\n  0  ok\n.fi\n\
                        .SH NOTES\n.PP\nSome text\nand more.\n";
        assert_eq!(sections(text), expected);
    }

    #[test]
    fn every_page_names_the_store_and_has_no_extra_section() {
        let mut all = args::definition();
        all.build();
        for command in all.get_subcommands().filter(|command| command.get_name() != "help") {
            let page = page(command.clone()).ok().unwrap();
            assert!(!page.contains(".SH EXTRA"), "{page}");
            let reads = command.get_arguments().any(|argument| argument.get_id() == "store");
            assert_eq!(page.contains("LEASEHOLD_STORE"), reads, "{}", command.get_name());
        }
        assert!(page(all).ok().unwrap().contains("LEASEHOLD_STORE"));
    }
}
