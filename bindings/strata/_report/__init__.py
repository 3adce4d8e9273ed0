"""What people are told: as text, as a page, as a trace.

Knows timelines and what a session counts. Must not know how plans are made.
In reading order: reports, report_text, html_report, html_figures, perfetto.
"""
