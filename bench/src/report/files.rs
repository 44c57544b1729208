//! A report as files: every value as CSV, the tables as Markdown, the plots as SVG.

use std::error::Error;
use std::fmt::Write;
use std::fs;
use std::path::Path;

use super::Report;
use crate::plots;

impl Report {
    /// Writes everything into a folder, over the files of an earlier run.
    pub(crate) fn write(&self, folder: &Path) -> Result<(), Box<dyn Error>> {
        fs::create_dir_all(folder)?;
        let mut values = csv::Writer::from_path(folder.join("values.csv"))?;
        values.write_record(["scenario", "measure", "who", "unit", "repetition", "value"])?;
        for figure in &self.figures {
            for (repetition, value) in figure.sample.0.iter().enumerate() {
                values.write_record([
                    figure.scenario,
                    &figure.what,
                    &figure.contender,
                    figure.unit,
                    &(repetition + 1).to_string(),
                    &value.to_string(),
                ])?;
            }
        }
        values.flush()?;
        let drawn = plots::draw(self, folder)?;
        let mut page = format!("# Measurements\n\n{}", self.for_markdown());
        for (file, title) in drawn {
            write!(page, "\n![{title}]({file})\n")?;
        }
        fs::write(folder.join("results.md"), page)?;
        Ok(())
    }
}
