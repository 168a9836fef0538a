"""Where an answer begins to repeat itself."""

from eagle3.prompts.loops import first_occurrence_end as first_occurrence_end
