"""What measures, simulates or checks this project itself, for those who develop it. Only a clone has it: the installed
package leaves it out."""
